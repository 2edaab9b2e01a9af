"""Natural texts by document, from packages with pinned hashes: what benchmarks/detect.py reads.

    python -c "from benchmarks.detect_texts import *; print(documents('news')[0])"

news: 300 reports of the Australian Broadcasting Corporation (Lee, Pincombe and Welsh 2005, "An
empirical evaluation of models of text document similarity"). django: its documentation, a page a
document. django_half: every second page, for a model that has learned the other half. shakespeare:
his 42 works. unread: the works of Shakespeare that no model of the default reads. held: the plays
that validate and test it.
"""

import re
import tarfile
from collections.abc import Iterator

from common.packages import fetch_package
from corpus.shakespeare import UNREAD, fetch_complete_works
from data.shakespeare_play.prepare import WORKS

DJANGO = (
    "django==5.2.19 --hash=sha256:ad03d8abc51dbff95ebf34b27123cf0c26a3b62db7ba0cd520783686362533d1"
)
GENSIM = (
    "gensim==4.4.0 --hash=sha256:a3f5b626da5518e79a479140361c663089fe7998df8ba52d56e1ded71ac5bdf5"
)
MIN_CHARACTERS = 400  # of a document


def documents(kind: str) -> list[str]:
    """Return the documents of a kind of text, in a fixed order."""
    found: list[str] = []
    if kind == "django_half":
        found = documents("django")[::2]
    elif kind == "django":
        for name, data in files_of(DJANGO):
            if re.search(r"/docs/.*\.txt$", name):
                found.append(data.decode())
    elif kind == "news":
        [data] = [data for name, data in files_of(GENSIM) if name.endswith("/lee_background.cor")]
        found = data.decode().splitlines()
    else:
        works = fetch_complete_works()
        titles = {"unread": UNREAD, "held": WORKS["val"] + WORKS["test"]}.get(kind, works)
        found = [works[title] for title in titles]
    return [text for text in found if len(text) >= MIN_CHARACTERS]


def files_of(package: str) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the files of a source package."""
    with tarfile.open(fetch_package(package)) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            file = archive.extractfile(member)
            if file is not None:
                yield member.name, file.read()

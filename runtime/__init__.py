"""The machinery of any training: processes, devices, files, command lines, logs.

Imports nothing from the root.
"""

import sys

if sys.platform not in ("linux", "darwin"):  # Windows has no fcntl, no resource
    message = f"ERROR: this system is {sys.platform!r}, but Crossover needs Linux or macOS; on Windows use WSL"
    print(message, file=sys.stderr)
    sys.exit(2)

"use strict";
// The page's behaviour: numbers of a token, tables to the clipboard, the game. Texts are set as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);

function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  return element;
}

// Keys that move among n tokens from the one at `place`; lines are those that the layout has made.
function moved(event, tokens, place) {
  if (event.altKey || event.ctrlKey || event.metaKey) return null;
  const last = tokens.length - 1;
  const vertical = (step) => {
    const from = tokens[place].getBoundingClientRect();
    let best = place, nearest = Infinity, line = null;
    for (let at = place + step; at >= 0 && at <= last; at += step) {
      const box = tokens[at].getBoundingClientRect();
      if (Math.abs(box.top - from.top) < 4) continue;
      if (line !== null && Math.abs(box.top - line) > 4) break;
      line = box.top;
      const distance = Math.abs(box.left - from.left);
      if (distance < nearest) { nearest = distance; best = at; }
    }
    return best;
  };
  switch (event.key) {
    case "ArrowLeft": return Math.max(0, place - 1);
    case "ArrowRight": return Math.min(last, place + 1);
    case "ArrowUp": return vertical(-1);
    case "ArrowDown": return vertical(1);
    case "Home": return 0;
    case "End": return last;
    default: return null;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// the numbers of a token

const tip = document.getElementById("tip");
let shown = null;

function number(value) {
  return value === null || value === undefined ? "-" : value.toFixed(4).replace("-", "\u2212");
}

function show(token, text) {
  const passage = data.passages[text.dataset.passage];
  const place = tokensOf(text).indexOf(token);
  const lines = [`token ${place + 1} of ${passage.tokens.length}: ${JSON.stringify(passage.tokens[place])}`];
  if (passage.natural) lines.push(`P(natural)  ${number(passage.natural[place])}`);
  if (passage.posterior) lines.push(`P(K = ${place})  ${number(passage.posterior[place])}`);
  if (passage.natural_log_probs) lines.push(`natural model: log-probability  ${number(passage.natural_log_probs[place])}`);
  lines.push(`generator: log-probability  ${number(passage.generator_log_probs[place])}`);
  hide();
  shown = token;
  token.classList.add("here");
  tip.textContent = lines.join("\n");
  tip.hidden = false;
  put();
}

// The numbers stay beside their token when the page scrolls.
function put() {
  if (!shown) return;
  const box = shown.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const above = box.top - own.height - 8, width = document.documentElement.clientWidth;
  tip.style.left = `${Math.max(8, Math.min(box.left, width - own.width - 8))}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
}

function hide() {
  if (shown) shown.classList.remove("here");
  shown = null;
  tip.hidden = true;
}

function tokensOf(text) {
  return [...text.querySelectorAll(":scope > span")];
}

for (const text of document.querySelectorAll(".text[data-passage]")) {
  const over = (event) => {
    const token = event.target.closest(".text > span");
    if (token) show(token, text);
  };
  text.addEventListener("pointerover", over);
  text.addEventListener("click", over);
  text.addEventListener("pointerleave", hide);
  text.addEventListener("blur", hide);
  text.addEventListener("focus", () => { if (!shown && text.matches(":focus-visible")) show(tokensOf(text)[0], text); });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const tokens = tokensOf(text), place = moved(event, tokens, Math.max(0, tokens.indexOf(shown)));
    if (place === null) return;
    event.preventDefault();
    show(tokens[place], text);
  });
}
addEventListener("scroll", put, { passive: true });
addEventListener("resize", put);

// ---------------------------------------------------------------------------------------------------------------------
// tables to the clipboard, as text with tabs and as a table

for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", () => {
    const selection = getSelection(), table = button.previousElementSibling.querySelector("table");
    const lines = [...table.rows].map((row) => [...row.cells].map((cell) => cell.innerText.replace(/\s+/g, " ")).join("\t"));
    const fill = (event) => {
      event.clipboardData.setData("text/plain", lines.join("\n"));
      event.clipboardData.setData("text/html", table.outerHTML);
      event.preventDefault();
    };
    selection.selectAllChildren(table);
    document.addEventListener("copy", fill, { once: true });
    const done = document.execCommand("copy");
    if (done) selection.removeAllRanges();
    button.textContent = done ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy table"; }, 2000);
  });
}

addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});

// ---------------------------------------------------------------------------------------------------------------------
// the game

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function play(passages) {
  const board = document.getElementById("board"), text = document.getElementById("game-text");
  const act = document.getElementById("game-act"), said = document.getElementById("game-said");
  const progress = document.getElementById("game-progress"), score = document.getElementById("game-score");
  const back = document.getElementById("game-back"), forward = document.getElementById("game-forward");
  let round, mark, isOpen, rounds;

  function begin() {
    round = 0;
    rounds = [];
    score.replaceChildren();
    deal();
  }

  function deal() {
    const passage = passages[round];
    isOpen = true;
    for (const part of [text, back, forward]) part.hidden = false;
    progress.textContent = `Passage ${round + 1} of ${passages.length}`;
    text.replaceChildren(...passage.tokens.map((token) => {
      const element = make("span");
      if (token.includes("\n") || token === "") element.append(make("i", token === "" ? "\u25ab" : "\u21b5"));
      element.append(token);
      return element;
    }));
    place(Math.floor(passage.tokens.length / 2));
    act.textContent = "The machine begins here";
  }

  function place(at) {
    const tokens = tokensOf(text);
    mark = Math.min(Math.max(at, 1), tokens.length - 1);
    tokens.forEach((token, index) => token.classList.toggle("here", index === mark));
    said.textContent = `Your K: ${mark} of ${tokens.length} tokens are natural`;
  }

  function insert(at, label, className) {
    const tokens = tokensOf(text);
    const sign = make("b", label, `k ${className}`);
    if (at < tokens.length) tokens[at].before(sign);
    else text.append(sign);
  }

  function choose() {
    const passage = passages[round], own = Math.abs(mark - passage.crossover);
    const model = Math.abs(passage.predicted - passage.crossover);
    isOpen = false;
    rounds.push({ passage, mark, own, model, constant: Math.abs(passage.tokens.length / 2 - passage.crossover) });
    tokensOf(text).forEach((token) => token.classList.remove("here"));
    insert(Math.round(passage.predicted), "reward model", "model");
    insert(mark, "you", "you");
    insert(passage.crossover, "K", "true");
    said.textContent = `You are ${own} tokens off, the reward model ${model.toFixed(1)}.`;
    act.textContent = round + 1 < passages.length ? "Next passage" : "Show the result";
    act.focus();
  }

  function finish() {
    const rows = rounds.map(({ passage, mark, own, model }, index) =>
      [index + 1, passage.crossover, mark, own, passage.predicted.toFixed(1), model.toFixed(1)]);
    const table = make("table"), head = table.createTHead().insertRow(), body = table.createTBody();
    for (const title of ["passage", "K", "your K", "your error", "reward model's E[K]", "its error"]) {
      head.append(make("th", title));
    }
    for (const cells of rows) {
      const row = body.insertRow();
      for (const cell of cells) row.insertCell().textContent = cell;
    }
    const own = mean(rounds.map((each) => each.own)), model = mean(rounds.map((each) => each.model));
    const constant = mean(rounds.map((each) => each.constant));
    const scroll = make("div", "", "scroll");
    scroll.append(table);
    said.textContent = `Your mean error: ${own.toFixed(1)} tokens. The reward model's: ${model.toFixed(1)}. ` +
      `Always the middle: ${constant.toFixed(1)}.`;
    progress.textContent = `All ${passages.length} passages played`;
    text.replaceChildren();
    for (const part of [text, back, forward]) part.hidden = true;
    score.replaceChildren(scroll);
    act.textContent = "Play again";
  }

  function next() {
    if (isOpen) return choose();
    if (rounds.length < passages.length) { round += 1; deal(); text.focus(); return; }
    if (text.childElementCount) return finish();
    begin();
    text.focus();
  }

  text.addEventListener("click", (event) => {
    const token = event.target.closest(".text > span");
    if (token && isOpen) place(tokensOf(text).indexOf(token));
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (!event.repeat) next();
      return;
    }
    const to = isOpen ? moved(event, tokensOf(text), mark) : null;
    if (to === null) return;
    event.preventDefault();
    place(to);
  });
  act.addEventListener("click", next);
  act.addEventListener("keydown", (event) => { if (event.repeat) event.preventDefault(); });
  for (const [button, step] of [[back, -1], [forward, 1]]) {
    button.addEventListener("click", () => { if (isOpen) place(mark + step); });
  }
  board.hidden = false;
  begin();
}

if (data.game.length) play(data.game);

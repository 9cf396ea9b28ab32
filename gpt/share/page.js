// The page: what a person does, and what is shown. It draws only by `textContent` and styles, so that no text
// is read as HTML.
//
// It asks `backend`, which is a server (http.js) or a worker (file.js):
//   ask(path, form)               gives the answer to a request
//   complete(form, take, signal)  calls `take` with each choice of a completion, as OpenAI's API has them
//   own                           names the weights that write when the slider is at its right end
//   live                          whether the run may still train
//
// Shapes: T tokens, L layers, H heads.
"use strict";
const $ = id => document.getElementById(id);
const make = (tag, className, textContent = "") =>
  Object.assign(document.createElement(tag), { className, textContent });

const SURPRISING = Math.log(1000);  // nats: a token of at most 0.1 % has the strongest shade
const REFRESH = 3000;  // milliseconds between two questions whether the run has new snapshots

let about = null;  // the answer of the backend: the model's name and figures, and its snapshots
let running = null;  // the AbortController of the present completion
let again = false;  // whether to write once more after it
let latest = 0;  // number of the newest request for attention; answers to earlier ones are dropped
let current = null;  // the present Text
let turns = [];  // messages of a chat
let chosen = Infinity;  // index of the token whose attention is shown
let place = [-1, 0];  // layer and head that are shown, if the model has them

/**
 * A token as the page knows it.
 * @typedef {object} Token
 * @property {number} id
 * @property {string} name its text
 * @property {number} index its place in the text
 * @property {?number} logProbability in nats; null for the first token of all
 * @property {[string, number][]} others the likeliest tokens and itself, with their log-probabilities
 * @property {boolean} prompt whether it belongs to the prompt
 */

/**
 * A text that is written.
 * @typedef {object} Text
 * @property {object} form its request
 * @property {Element} box where it is shown
 * @property {Token[]} tokens
 * @property {[Element, Token][]} marks its pieces, each with its last token
 * @property {number} written characters that are shown
 * @property {number[]} [prompt] the ids of the prompt
 */

const showError = error => {
  $("error").textContent = error.message;
};

// The step at which the slider stands; undefined at its right end.
const moment = () => about?.snapshots[$("moment").value];

// ---- what the page says of the model

function describe() {
  $("model").textContent = about.id;
  document.title = `${about.id} · gpt`;
  $("figures").textContent = figures(about.figures).join(" · ");
  $("underlined").hidden = !about.copied;
  if (!about.chat) return;
  document.body.className = "chat";
  $("asked").textContent = "Message. Enter sends it, Shift-Enter begins a new line.";
  $("generate").textContent = "Send";
  $("what").textContent = "No message yet.";
  $("how").textContent = "Type a message and press Enter. The model replies as in its examples.";
  $("clear").hidden = false;
  $("system_field").hidden = false;
}

// The figures that are known, as phrases.
function figures({ parameters, text, minutes, bits_per_byte }) {
  const thousands = `${Math.ceil(parameters / 1e3)} thousand`;
  const millions = `${(parameters / 1e6).toFixed(1)} million`;
  const phrases = [`${parameters < 1e6 ? thousands : millions} parameters`];
  if (text) phrases.push(`trained on ${text}`);
  if (minutes) phrases.push(`${minutes.toFixed(1)} minutes of training`);
  if (bits_per_byte) phrases.push(`${bits_per_byte.toFixed(2)} bits per byte of held-out text`);
  return phrases;
}

// ---- a text

// The form of a request, as the settings are.
function settings() {
  const form = { logprobs: 5, stream: true, heal: true };  // 5: `LIKELIEST` in worker.js
  for (const id of ["temperature", "max_tokens", "top_p", "repetition_penalty", "min_p"]) {
    form[id] = Number($(id).value);
  }
  if ($("top_k").value > 0) form.top_k = Number($("top_k").value);
  const seed = $("seed").value.trim();
  const isNumber = /^-?\d+$/.test(seed) && Number.isSafeInteger(Number(seed));
  if (seed) form.seed = isNumber ? Number(seed) : seed;  // an error names what is no number, or too large
  if ($("stop").value) form.stop = $("stop").value.replaceAll("\\n", "\n").replaceAll("\\t", "\t");
  return form;
}

// Begin a text: the form of its request, and its place on the page.
function begin(prompt) {
  const form = settings();
  const step = moment();
  let box = $("text");
  if (about.chat) {
    box = beginReply(prompt);
    const system = $("system").value;
    form.messages = system ? [{ role: "system", content: system }, ...turns] : [...turns];
  } else {
    box.replaceChildren();
    form.prompt = prompt;
  }
  if (step !== undefined) {
    form.snapshot = step;
    form.seed ??= 1;  // all steps draw the same random numbers
    form.echo = !about.chat && prompt !== "";  // and show what they make of the prompt
  }
  if (prompt && !about.chat && !form.echo) box.append(make("span", "prompt", prompt));
  current = { form, box, tokens: [], marks: [], written: 0 };
}

// Show a message, and return the box of the reply to it. Without a message the last reply is replaced by a
// new one.
function beginReply(content) {
  if (!turns.length) $("text").replaceChildren();
  if (!content && turns.at(-1)?.role === "assistant") {
    turns.pop();
    $("text").lastChild.remove();
  }
  if (content) {
    turns.push({ role: "user", content });
    say("user", "You", content);
    $("prompt").value = "";
  }
  if (!turns.length) throw new Error("type a message first");
  const bubble = say("assistant", "Model", "");
  $("text").scrollTop = $("text").scrollHeight;
  return bubble;
}

// Take back a message that got no reply, so that it can be sent again. `content` is empty if the reply to an
// earlier message was to be written again.
function takeBack(content) {
  current.box.parentElement.remove();
  if (!content) return;
  turns.pop();
  $("text").lastChild.remove();
  $("prompt").value ||= content;
}

// Add a message to the chat, and return its bubble.
function say(role, name, content) {
  const message = make("div", `said ${role}`);
  const bubble = make("div", `turn ${role}`, content);
  message.append(make("span", "role", name), bubble);
  $("text").append(message);
  return bubble;
}

function setRunning(controller) {
  running = controller;
  $("generate").disabled = controller !== null;
  $("halt").disabled = controller === null;
  $("text").ariaBusy = String(controller !== null);  // a screen reader waits for the whole text
}

// Whether a text is still on the page. It is not if a new chat was begun meanwhile.
const isOnPage = text => text.box.isConnected;

// Write a text or a reply. `repeats` means that other weights shall write it again: then what is typed into a
// chat meanwhile stays there.
async function generate({ repeats = false } = {}) {
  if (running) return;
  setRunning(new AbortController());
  const watching = moment() !== undefined;
  const before = current;
  let typed = "";
  latest++;
  for (const id of ["error", "speed", "copied"]) $(id).textContent = "";
  if (!watching) {
    $("attention").hidden = true;
    chosen = Infinity;
  }
  try {
    if (!about) await follow();
    typed = about.chat && repeats ? "" : $("prompt").value;
    begin(typed);
    await write();
    if (isOnPage(current)) await showMore(watching);
  } catch (error) {
    if (error.name !== "AbortError") {
      showError(error);
      const hasBegun = current !== before;
      const isEmptyReply = about?.chat && hasBegun && !current.tokens.length;
      if (isEmptyReply && isOnPage(current)) takeBack(typed);
    }
  }
  const hasNoReply = turns.at(-1)?.role === "user";
  if (hasNoReply && isOnPage(current)) {
    turns.push({ role: "assistant", content: current.box.textContent });
  }
  setRunning(null);
  if (again) {
    again = false;
    generate({ repeats: true });
  }
}

// Show what a text attends to, while one watches the training, and what of it is copied.
async function showMore(watching) {
  const mark = current.marks.find(([, token]) => token.index >= chosen) ?? current.marks.at(-1);
  if (watching && mark) await showAttention(current, ...mark);
  if (about.copied) await showCopied(current);
}

async function write() {
  const start = performance.now();
  await backend.complete(current.form, choice => {
    if (!isOnPage(current)) return;
    add(current, choice);
    const rate = current.tokens.length / ((performance.now() - start) / 1000);
    $("speed").textContent = `${current.tokens.length} tokens, ${Number(rate.toPrecision(3))} per second`;
  }, running.signal);
}

// Add a choice of a completion to the text. Several tokens can share a mark, because text is held back while
// it may be part of a character or of a stop string: a token without text belongs to the next mark.
function add(text, { text: piece, logprobs }) {
  const { form, tokens, marks } = text;
  text.prompt ??= logprobs.prompt_token_ids;  // in the first choice
  const left = form.echo ? form.prompt.length - text.written : 0;  // characters of the prompt
  const prompt = left > 0 && piece.length <= left;
  for (const [i, id] of logprobs.token_ids.entries()) {
    const name = logprobs.tokens[i];
    const logProbability = logprobs.token_logprobs[i];
    const others = Object.entries(logprobs.top_logprobs[i] ?? {}).sort((a, b) => b[1] - a[1]);
    tokens.push({ id, name, index: tokens.length, logProbability, others, prompt });
  }
  if (!piece) return;
  const mark = markOf(text, piece, tokens.at(-1));
  marks.push([mark, tokens.at(-1)]);
  text.written += piece.length;
  keepEndInView(() => text.box.append(mark));
}

// The element of a piece of text, shaded by how surprising its last token was.
function markOf(text, piece, token) {
  const mark = make("span", token.prompt ? "token prompt" : "token", piece);
  mark.tabIndex = text.marks.length ? -1 : 0;  // Tab reaches the first one, the arrow keys the others
  mark.setAttribute("aria-describedby", "tip");
  mark.style.setProperty("--a", Math.min(1, -(token.logProbability ?? 0) / SURPRISING).toFixed(3));
  for (const event of ["pointerenter", "focus"]) mark.addEventListener(event, () => showTip(mark, token));
  for (const event of ["pointerleave", "blur"]) mark.addEventListener(event, hideTip);
  const choose = () => {
    chosen = token.index;
    showAttention(text, mark, token).catch(showError);
  };
  mark.addEventListener("click", choose);
  mark.addEventListener("keydown", event => {
    if (event.key === "Enter") choose();
  });
  return mark;
}

// Add to a chat; it stays at its end, unless one has scrolled up.
function keepEndInView(append) {
  const box = $("text");
  const atEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 40;
  append();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

// ---- the alternatives of a token

const visible = name => name.replaceAll("\n", "↵").replaceAll("\t", "→").replaceAll(" ", "·") || "∅";

// Show the likeliest tokens and the token itself beside its mark.
function showTip(mark, token) {
  const table = make("table");
  for (const [name, logProbability] of token.others) {
    const probability = Math.exp(logProbability);
    const row = table.insertRow();
    row.className = name === token.name ? "own" : "";
    row.insertCell().append(make("code", "", visible(name)));
    row.insertCell().textContent = probability < 0.001 ? "< 0.1 %" : (100 * probability).toFixed(1) + " %";
  }
  const tip = $("tip");
  tip.replaceChildren(table);
  tip.style.display = "block";
  const line = mark.getClientRects()[0];  // the first, if the mark has several
  tip.style.left = Math.max(4, Math.min(line.left, innerWidth - tip.offsetWidth - 4)) + "px";
  const below = line.bottom + 6;
  tip.style.top = (below + tip.offsetHeight < innerHeight ? below : line.top - tip.offsetHeight - 6) + "px";
}

const hideTip = () => {
  $("tip").style.display = "none";
};

// ---- attention

/**
 * Show what the model attended to when it drew a token.
 * @param {Text} text
 * @param {Element} mark
 * @param {Token} token
 */
async function showAttention(text, mark, token) {
  const request = ++latest;
  document.querySelector(".token.chosen")?.classList.remove("chosen");
  mark.classList.add("chosen");
  const { tokens, weights } = await backend.ask("attention", attentionForm(text, token));
  if (request !== latest) return;
  $("attention").hidden = false;
  $("chosen").textContent = visible(token.name);
  $("grid").style.gridTemplateColumns = `repeat(${weights[0].length}, minmax(.9rem, 1.6rem))`;
  const cellsOf = (heads, layer) => heads.map((_, head) => cellOf(tokens, weights, layer, head));
  $("grid").replaceChildren(...weights.flatMap(cellsOf));
  const [layer, head] = weights[place[0]]?.[place[1]] ? place : [weights.length - 1, 0];
  showHead(tokens, weights, layer, head);
}

// The cell of a head, shaded by its largest weight.
function cellOf(tokens, weights, layer, head) {
  const cell = make("button");
  cell.title = nameOf(layer, head);
  cell.ariaLabel = nameOf(layer, head);
  cell.style.setProperty("--a", (0.08 + 0.92 * Math.max(...weights[layer][head])).toFixed(3));
  cell.addEventListener("click", () => {
    place = [layer, head];
    showHead(tokens, weights, layer, head);
  });
  return cell;
}

const nameOf = (layer, head) => `Layer ${layer}, head ${head}`;

// The request for the attention from the last token before `token`: all that the model had read then.
function attentionForm({ form, tokens, prompt }, token) {
  const { messages, snapshot } = form;
  const before = tokens.slice(0, token.index).map(other => other.id);
  if (messages) return { messages, tokens: before, snapshot };
  // With `echo` most of the prompt is among the tokens.
  const echoed = form.echo ? tokens.filter(other => other.prompt).length : 0;
  const read = [...prompt.slice(0, Math.max(0, prompt.length - echoed)), ...before];
  return { prompt: read.length ? read : "", tokens: [], snapshot };
}

// Shade the tokens (T) by their weights, of (L, H, T), in a head.
function showHead(tokens, weights, layer, head) {
  const label = nameOf(layer, head);
  for (const cell of $("grid").children) {
    const isShown = cell.ariaLabel === label;
    cell.setAttribute("aria-pressed", isShown);
    cell.tabIndex = isShown ? 0 : -1;
  }
  const largest = Math.max(...weights[layer][head]);
  $("which").textContent = `${label}: largest weight ${(100 * largest).toFixed(0)} %`;
  $("seen").replaceChildren(...tokens.map((name, i) => {
    const span = make("span", /^\n+$/.test(name) ? "lines" : "", name);
    const weight = weights[layer][head][i];
    span.title = (100 * weight).toFixed(1) + " %";
    span.style.setProperty("--a", Math.sqrt(weight / largest).toFixed(3));
    return span;
  }));
}

// ---- what is copied

// Underline what stands verbatim in the training text.
async function showCopied(text) {
  const own = text.tokens.filter(token => !token.prompt);
  const { runs } = await backend.ask("copied", { tokens: own.map(token => token.id) });
  if (!isOnPage(text)) return;
  const copied = new Set(runs.flatMap(([start, end]) => own.slice(start, end)));
  for (const [mark, token] of text.marks) mark.classList.toggle("copied", copied.has(token));
  const longest = Math.max(0, ...runs.map(([start, end]) => end - start));
  const run = longest ? `, the longest run ${longest}` : "";
  $("copied").textContent = `${copied.size} of ${own.length} tokens are copied${run}`;
}

// ---- the training

// Draw the losses, each above the slider's place of its snapshot, and a point where the slider stands.
function drawTraining() {
  const losses = about.train.map(([, loss]) => loss);
  const lowest = Math.min(...losses);
  const range = Math.max(...losses) - lowest || 1;
  const points = about.train.map(([step, loss]) => {
    const x = 100 * about.snapshots.indexOf(step) / about.snapshots.length;
    return `${x} ${95 - 90 * (loss - lowest) / range}`;
  });
  $("losses").setAttribute("points", points);
  const step = moment();
  const here = about.train.findIndex(([other]) => other === step);
  $("point").setAttribute("d", here < 0 ? "" : `M${points[here]}h0`);
  const loss = here < 0 ? "" : `, training loss ${losses[here].toFixed(2)}`;
  $("when").value = step === undefined ? backend.own : `step ${step}${loss}`;
  $("moment").setAttribute("aria-valuetext", $("when").value);
}

// Replace the text by one of the weights at the slider's place.
function watch() {
  drawTraining();
  if (running) {
    again = true;
    running.abort();
  } else if (!about.chat || turns.length) {
    generate({ repeats: true });
  }
}

// Ask what is served, at first and again while the run trains. The slider stays at its right end, or at the
// newest step, or at its step. If that was deleted, it goes to the next one that is left, or to the newest.
async function follow() {
  const next = await backend.ask("about");
  const step = moment();  // the slider may have moved meanwhile
  const steps = next.snapshots;
  const wasNewest = step !== undefined && step === about.snapshots.at(-1);
  const isFirst = !about;
  about = next;
  if (isFirst) describe();
  $("training").hidden = !steps.length;
  $("moment").max = steps.length;
  if (step === undefined) $("moment").value = steps.length;
  else {
    const left = wasNewest ? -1 : steps.findIndex(other => other >= step);
    $("moment").value = left < 0 ? steps.length - 1 : left;
  }
  if (wasNewest && step !== steps.at(-1)) watch();
  else drawTraining();
}

// ---- what a person does

for (const slider of document.querySelectorAll(".settings input[type=range]")) {
  const show = () => {
    const value = slider.value === slider.dataset.off ? "off" : slider.value;
    slider.previousElementSibling.querySelector("output").value = value;
    slider.setAttribute("aria-valuetext", value);
  };
  slider.addEventListener("input", show);
  show();
}

// Let the arrow keys, Home and End move among the elements of a container, of which Tab reaches one.
function moveByArrows(container, selector, columns) {
  container.addEventListener("keydown", event => {
    const all = [...container.querySelectorAll(selector)];
    const at = all.indexOf(document.activeElement);
    const places = {
      ArrowLeft: at - 1,
      ArrowRight: at + 1,
      ArrowUp: at - columns(),
      ArrowDown: at + columns(),
      Home: 0,
      End: all.length - 1,
    };
    const next = all[places[event.key]];
    if (at < 0 || !next) return;
    event.preventDefault();
    all[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}
moveByArrows($("text"), ".token", () => NaN);  // up and down scroll
moveByArrows($("grid"), "button", () => getComputedStyle($("grid")).gridTemplateColumns.split(" ").length);

$("moment").addEventListener("input", watch);
$("generate").addEventListener("click", () => generate());
$("halt").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  latest++;  // an answer that comes later would show the attention again
  turns = [];
  $("text").replaceChildren();
  $("attention").hidden = true;
  for (const id of ["error", "speed", "copied"]) $(id).textContent = "";
  $("prompt").focus();
});
$("prompt").addEventListener("keydown", event => {
  const starts = about?.chat ? !event.shiftKey && !event.isComposing : event.ctrlKey || event.metaKey;
  if (event.key !== "Enter" || !starts) return;
  event.preventDefault();
  generate();
});
$("key").addEventListener("change", () => {
  follow().then(() => { $("error").textContent = ""; }).catch(showError);
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape") hideTip();
});

// http.js or file.js calls it, after it has defined `backend`.
function start() {
  $("following").hidden = !backend.live;
  $("error").textContent = "";
  follow().catch(showError);
  if (!backend.live) return;
  setInterval(() => {
    if (about?.snapshots.length && !document.hidden) follow().catch(() => {});
  }, REFRESH);
}

// The page. It asks `backend`, a server or a worker: `ask(path, form)` gives an answer, `complete(form, take, signal)`
// hands over the choices of a completion, `own` says whose weights write where the slider is at its right end.
"use strict";
const $ = id => document.getElementById(id);
const make = (tag, className, textContent = "") => Object.assign(document.createElement(tag), { className, textContent });
let about = null, running = null, again = false, latest = 0;
let text = null;  // the present one: its form, tokens, and (element, last token) pairs, and the box that it is in
let turns = [];  // of a chat
let chosen = Infinity, place = [-1, 0];  // the token and the head whose attention is shown, if they are there

for (const slider of document.querySelectorAll(".settings input[type=range]")) {
  const show = () => { slider.previousElementSibling.querySelector("output").value = slider.value === slider.dataset.off ? "off" : slider.value; };
  slider.addEventListener("input", show);
  show();
}

const showError = error => { $("error").textContent = error.message; };

// The step at which the slider stands; undefined at its right end.
const moment = () => about?.snapshots[$("moment").value];

function describe() {
  $("model").textContent = document.title = about.id;
  if (!about.chat) return;
  document.body.className = "chat";
  $("asked").textContent = "Message: Enter sends, Shift-Enter begins a new line";
  $("generate").textContent = "Send";
  $("clear").hidden = $("system_field").hidden = false;
}

// The form of a request, as the settings are.
function settings() {
  const form = { logprobs: 5, stream: true, heal: true };
  for (const id of ["temperature", "max_tokens", "top_p", "repetition_penalty", "top_k", "min_p"]) {
    if (id !== "top_k" || $(id).value > 0) form[id] = Number($(id).value);
  }
  const seed = $("seed").value.trim();
  if (seed) form.seed = /^-?\d+$/.test(seed) ? Number(seed) : seed;  // an error says what is not a number
  if ($("stop").value) form.stop = $("stop").value.replaceAll("\\n", "\n").replaceAll("\\t", "\t");
  return form;
}

// Begin a text: the form of its request, and its place on the page.
function begin() {
  const form = settings(), step = moment(), content = $("prompt").value, system = $("system").value;
  let box = $("text");
  if (!turns.length) box.replaceChildren();
  if (about.chat) {
    if (turns.at(-1)?.role === "assistant" && !content) { turns.pop(); box.lastChild.remove(); }  // written again
    if (content) { turns.push({ role: "user", content }); box.append(make("div", "turn user", content)); }
    if (!turns.length) throw new Error("type a message first");
    $("prompt").value = "";
    form.messages = system ? [{ role: "system", content: system }, ...turns] : [...turns];
    box.append(box = make("div", "turn assistant"));
  } else form.prompt = content;
  // All steps draw the same random numbers, and show what they make of the prompt.
  if (step !== undefined) Object.assign(form, { seed: 1, ...form, snapshot: step, echo: !about.chat && content !== "" });
  if (!about.chat && !form.echo) box.append(make("span", "prompt", content));
  text = { form, box, tokens: [], marks: [], written: 0 };
}

async function generate() {
  if (running) return;
  running = new AbortController();
  const watching = moment() !== undefined;
  latest++;
  $("generate").disabled = true; $("halt").disabled = false;
  for (const id of ["error", "speed", "copied"]) $(id).textContent = "";
  if (!watching) { $("attention").hidden = true; chosen = Infinity; }
  try {
    if (!about) await follow();
    begin();
    const startTime = performance.now();
    await backend.complete(text.form, choice => {
      add(text, choice);
      const rate = text.tokens.length / ((performance.now() - startTime) / 1000);
      $("speed").textContent = `${text.tokens.length} tokens, ${rate.toFixed(1)} per second`;
    }, running.signal);
    const mark = text.marks.find(([, token]) => token.index >= chosen) ?? text.marks.at(-1);
    if (watching && mark) await showAttention(text, ...mark);
    if (about.copied) await showCopied(text);
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  }
  if (turns.at(-1)?.role === "user") turns.push({ role: "assistant", content: text.box.textContent });
  running = null;
  $("generate").disabled = false; $("halt").disabled = true;
  if (again) { again = false; generate(); }
}

// Text is held back while it may be part of a character or of a stop string, so a piece of it can belong to several
// tokens: those before it that had no text share its mark.
function add(text, { text: piece, logprobs }) {
  const { form, tokens, marks } = text;
  text.prompt ??= logprobs.prompt_token_ids;  // in the first choice
  const prompt = form.echo && text.written + piece.length <= form.prompt.length && text.written < form.prompt.length;
  for (const [i, id] of logprobs.token_ids.entries()) {
    const others = Object.entries(logprobs.top_logprobs[i] ?? {}).sort((one, other) => other[1] - one[1]);
    tokens.push({ id, name: logprobs.tokens[i], p: Math.exp(logprobs.token_logprobs[i]), others, index: tokens.length, prompt });
  }
  if (!piece) return;
  const last = tokens.at(-1), mark = make("span", prompt ? "token prompt" : "token", piece);
  mark.tabIndex = 0;
  mark.style.setProperty("--a", (0.75 * (1 - last.p) ** 2).toFixed(3));
  for (const enter of ["pointerenter", "focus"]) mark.addEventListener(enter, () => tip(mark, last));
  for (const leave of ["pointerleave", "blur"]) mark.addEventListener(leave, () => { $("tip").style.display = "none"; });
  const choose = () => { chosen = last.index; showAttention(text, mark, last).catch(showError); };
  mark.addEventListener("click", choose);
  mark.addEventListener("keydown", event => { if (event.key === "Enter") choose(); });
  text.box.append(mark);
  marks.push([mark, last]);
  text.written += piece.length;
}

const visible = name => name.replaceAll("\n", "↵").replaceAll("\t", "→").replaceAll(" ", "·") || "∅";

// The alternatives of a token, the server's likeliest and itself, beside its mark.
function tip(mark, token) {
  const box = $("tip"), table = make("table"), place = mark.getClientRects()[0];
  for (const [name, p] of token.others) {
    const row = table.insertRow(), share = Math.exp(p);
    row.className = name === token.name ? "own" : "";
    row.insertCell().append(make("code", "", visible(name)));
    row.insertCell().textContent = share < 0.001 ? "< 0.1 %" : (100 * share).toFixed(1) + " %";
  }
  box.replaceChildren(table);
  box.style.display = "block";
  box.style.left = Math.max(4, Math.min(place.left, innerWidth - box.offsetWidth - 4)) + "px";
  const below = place.bottom + 6;
  box.style.top = (below + box.offsetHeight < innerHeight ? below : place.top - box.offsetHeight - 6) + "px";
}

async function showAttention({ form, tokens: all, prompt: read }, mark, token) {
  const turn = ++latest;
  document.querySelector(".token.chosen")?.classList.remove("chosen");
  mark.classList.add("chosen");
  const before = all.slice(0, token.index).map(other => other.id), { messages, snapshot } = form;
  // What the model read before: of the prompt, what is not among the tokens.
  const unseen = form.echo ? Math.max(0, read.length - all.filter(one => one.prompt).length) : read.length;
  const seen = [...read.slice(0, unseen), ...before];
  const asked = messages ? { messages, tokens: before } : { prompt: seen.length ? seen : "", tokens: [] };
  const { tokens, weights } = await backend.ask("attention", { ...asked, snapshot });
  if (turn !== latest) return;
  $("attention").hidden = false;
  $("chosen").textContent = visible(token.name);
  $("grid").replaceChildren();
  $("grid").style.gridTemplateColumns = `repeat(${weights[0].length}, minmax(.9rem, 1.6rem))`;
  const show = (layer, head) => {
    for (const cell of $("grid").children) cell.setAttribute("aria-pressed", cell.ariaLabel === `Layer ${layer}, head ${head}`);
    const most = Math.max(...weights[layer][head]);
    $("which").textContent = `Layer ${layer}, head ${head}: largest weight ${(100 * most).toFixed(0)} %`;
    $("seen").replaceChildren(...tokens.map((text, i) => {
      const span = make("span", "", text), weight = weights[layer][head][i];
      span.title = (100 * weight).toFixed(1) + " %";
      span.style.setProperty("--a", (0.8 * Math.sqrt(weight / most)).toFixed(3));
      return span;
    }));
  };
  weights.forEach((layer, l) => layer.forEach((head, h) => {
    const cell = make("button");
    cell.title = cell.ariaLabel = `Layer ${l}, head ${h}`;
    cell.style.background = `rgba(var(--rgb), ${(0.08 + 0.92 * Math.max(...head)).toFixed(3)})`;
    cell.addEventListener("click", () => show(...(place = [l, h])));
    $("grid").append(cell);
  }));
  show(...(weights[place[0]]?.[place[1]] ? place : [weights.length - 1, 0]));
}

// Underline what is copied verbatim from the training text.
async function showCopied({ tokens, marks }) {
  const own = tokens.filter(token => !token.prompt), { runs } = await backend.ask("copied", { tokens: own.map(token => token.id) });
  const copied = new Set(runs.flatMap(([start, end]) => own.slice(start, end)));
  for (const [mark, token] of marks) mark.classList.toggle("copied", copied.has(token));
  const longest = Math.max(0, ...runs.map(([start, end]) => end - start));
  $("copied").textContent = `${copied.size} of ${own.length} tokens are copied` + (longest ? `, the longest run ${longest}` : "");
}

// The losses over the logarithm of the step, as wide and high as the picture, and a point where the slider stands.
function drawTraining() {
  const step = moment(), points = about.train.map(([step, loss]) => [Math.log(step), -loss]);
  const [left, top] = [0, 1].map(k => Math.min(...points.map(point => point[k])));
  const [width, height] = [0, 1].map(k => Math.max(...points.map(point => point[k])) - [left, top][k] || 1);
  const at = points.map(([x, y]) => `${5 + 90 * (x - left) / width} ${5 + 90 * (y - top) / height}`);
  const here = about.train.findIndex(point => point[0] === step), loss = about.train[here]?.[1];
  $("losses").setAttribute("points", at);
  $("point").setAttribute("d", here < 0 ? "" : `M${at[here]}h0`);
  $("when").value = step === undefined ? backend.own : `step ${step}` + (here < 0 ? "" : `, training loss ${loss.toFixed(2)}`);
}

// Write the text again with the weights at the slider's place.
function watch() {
  drawTraining();
  if (running) { again = true; running.abort(); } else if (!about.chat || turns.length) generate();
}

// Ask what is served, and again while the run trains; the slider stays at its step, at the newest or at the right end.
async function follow() {
  const next = await backend.ask("about"), step = moment(), steps = next.snapshots;  // the slider may have moved meanwhile
  const newest = step !== undefined && step === about.snapshots.at(-1);
  if (!about) describe(about = next);
  about = next;
  $("training").hidden = !steps.length;
  $("moment").max = steps.length;
  $("moment").value = step === undefined ? steps.length : newest ? steps.length - 1 : steps.findIndex(one => one >= step);
  if (newest && step !== steps.at(-1)) watch(); else drawTraining();
}

$("moment").addEventListener("input", watch);
$("generate").addEventListener("click", generate);
$("halt").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  turns = [];
  $("text").replaceChildren();
  $("attention").hidden = true;
});
$("prompt").addEventListener("keydown", event => {
  const starts = about?.chat ? !event.shiftKey && !event.isComposing : event.ctrlKey || event.metaKey;
  if (event.key !== "Enter" || !starts) return;
  event.preventDefault();
  generate();
});
$("key").addEventListener("change", () => follow().catch(showError));

function start() {
  $("following").hidden = !backend.live;
  $("error").textContent = "";
  follow().catch(showError);
  if (backend.live) setInterval(() => { if (about?.snapshots.length && !document.hidden) follow().catch(() => {}); }, 3000);
}

// The page. It asks `backend`, a server or a worker: `ask(path, form)` gives an answer, `complete(form, signal)`
// yields the choices of a completion, `own` says whose weights write where the slider is at its right end.
"use strict";
const $ = id => document.getElementById(id);
const make = (tag, className, textContent = "") => Object.assign(document.createElement(tag), { className, textContent });
const sliders = [...document.querySelectorAll(".settings input[type=range]")];
let about = null, running = null, latest = 0;
let text = null;  // the present one: its form, tokens, and (element, last token) pairs, and the box that it is in
let turns = [];  // of a chat
let chosen = Infinity, place = [-1, 0];  // the token and the head whose attention is shown, if they are there
let training = { snapshots: [], train: [] }, again = false, playing = false, timer;

for (const slider of sliders) {
  const show = () => {
    const output = slider.previousElementSibling.querySelector("output");
    output.value = slider.value === slider.dataset.off ? "off" : slider.value;
  };
  slider.addEventListener("input", show);
  show();
}

const showError = error => { $("error").textContent = error.message; };

// The step at which the slider stands; undefined at its right end.
const moment = () => training.snapshots[$("moment").value];

async function describe() {
  about = await backend.ask("about");
  $("model").textContent = document.title = about.id;
  if (!about.chat) return;
  document.body.className = "chat";
  $("asked").textContent = "Message: Enter sends, Shift-Enter begins a new line";
  $("generate").textContent = "Send";
  $("clear").hidden = $("system_field").hidden = false;
}

function settings() {
  const value = id => Number($(id).value);
  const form = {
    temperature: value("temperature"), max_tokens: value("max_tokens"), top_p: value("top_p"),
    repetition_penalty: value("repetition_penalty"), logprobs: 5, stream: true,
  };
  if (value("top_k")) form.top_k = value("top_k");
  if (value("min_p")) form.min_p = value("min_p");
  const seed = $("seed").value.trim();
  if (seed) form.seed = /^-?\d+$/.test(seed) ? Number(seed) : seed;  // an error says what is not a number
  if ($("stop").value) form.stop = $("stop").value.replaceAll("\\n", "\n");
  return form;
}

// Begin a text: the form of its request, and its place on the page.
async function begin() {
  const form = settings(), step = moment();
  let box = $("text");
  if (about.chat) {
    const content = $("prompt").value, system = $("system").value;
    if (!turns.length) box.replaceChildren();
    if (turns.at(-1)?.role === "assistant" && !content) { turns.pop(); box.lastChild.remove(); }  // written anew
    if (content) { turns.push({ role: "user", content }); box.append(make("div", "turn user", content)); }
    if (!turns.length) throw new Error("type a message first");
    $("prompt").value = "";
    const messages = system ? [{ role: "system", content: system }, ...turns] : turns;
    form.prompt = (await backend.ask("conversation", { messages })).tokens;
    box.append(box = make("div", "turn assistant"));
  } else form.prompt = $("prompt").value;
  // All steps draw the same random numbers, and show what they make of the prompt.
  if (step !== undefined) Object.assign(form, { seed: 1, ...form, snapshot: step, echo: !about.chat && form.prompt !== "" });
  if (!about.chat) box.replaceChildren(make("span", "prompt", form.echo ? "" : form.prompt));
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
    if (!about) await describe();
    await begin();
    const startTime = performance.now();
    for await (const choice of backend.complete(text.form, running.signal)) {
      add(text, choice);
      const rate = text.tokens.length / ((performance.now() - startTime) / 1000);
      $("speed").textContent = `${text.tokens.length} tokens, ${rate.toFixed(1)} per second`;
    }
    const mark = text.marks.find(([, token]) => token.index >= chosen) ?? text.marks.at(-1);
    if (watching && mark) await showAttention(text, ...mark);
    if (about.copied) await showCopied(text);
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
    if (!again) setPlaying(false);
  }
  if (turns.at(-1)?.role === "user") turns.push({ role: "assistant", content: text.box.textContent });
  running = null;
  $("generate").disabled = false; $("halt").disabled = true;
  if (again) { again = false; generate(); } else if (playing) setTimeout(playNext, 500);
}

// Text is held back while it may be part of a character or of a stop string, so a piece of it can belong to several
// tokens: those before it that had no text share its mark.
function add(text, { text: piece, logprobs }) {
  const { form, tokens, marks } = text, prompt = form.echo && text.written < form.prompt.length;
  for (const [i, id] of logprobs.token_ids.entries()) {
    const others = Object.entries(logprobs.top_logprobs[i] ?? {}).sort((one, other) => other[1] - one[1]);
    tokens.push({ id, name: logprobs.tokens[i], p: Math.exp(logprobs.token_logprobs[i]), others, index: tokens.length, prompt });
  }
  if (!piece) return;
  const last = tokens.at(-1), mark = make("span", prompt ? "token prompt" : "token", piece);
  mark.tabIndex = 0;
  mark.style.setProperty("--a", (0.75 * (1 - last.p) ** 2).toFixed(3));
  mark.addEventListener("pointerenter", () => tip(mark, last));
  mark.addEventListener("focus", () => tip(mark, last));
  for (const leave of ["pointerleave", "blur"]) mark.addEventListener(leave, () => { $("tip").style.display = "none"; });
  const choose = () => { chosen = last.index; showAttention(text, mark, last).catch(showError); };
  mark.addEventListener("click", choose);
  mark.addEventListener("keydown", event => { if (event.key === "Enter") choose(); });
  text.box.append(mark);
  marks.push([mark, last]);
  text.written += piece.length;
}

const visible = name => name.replaceAll("\n", "↵").replaceAll("\t", "→").replaceAll(" ", "·") || "∅";

function tip(mark, token) {
  const table = make("table"), rows = token.others.map(([name, p]) => [name, Math.exp(p)]);
  if (!rows.some(([name]) => name === token.name)) rows.push([token.name, token.p]);
  for (const [name, p] of rows) {
    const row = table.insertRow();
    row.className = name === token.name ? "own" : "";
    row.insertCell().append(make("code", "", visible(name)));
    row.insertCell().textContent = p < 0.001 ? "< 0.1 %" : (100 * p).toFixed(1) + " %";
  }
  const box = $("tip"), place = mark.getClientRects()[0];
  box.replaceChildren(table);
  box.style.display = "block";
  box.style.left = Math.max(4, Math.min(place.left, innerWidth - box.offsetWidth - 4)) + "px";
  const below = place.bottom + 6;
  box.style.top = (below + box.offsetHeight < innerHeight ? below : place.top - box.offsetHeight - 6) + "px";
}

async function showAttention({ form, tokens: all }, mark, token) {
  const turn = ++latest;
  document.querySelector(".token.chosen")?.classList.remove("chosen");
  mark.classList.add("chosen");
  const before = all.slice(0, token.index).map(other => other.id), { snapshot } = form;
  const asked = about.chat ? { prompt: "", tokens: [...form.prompt, ...before] } : { prompt: form.echo ? "" : form.prompt, tokens: before };
  const { tokens, weights } = await backend.ask("attention", { ...asked, snapshot });
  if (turn !== latest) return;
  const grid = $("grid"), heads = weights[0].length;
  $("attention").hidden = false;
  $("chosen").textContent = visible(token.name);
  grid.replaceChildren();
  grid.style.gridTemplateColumns = `repeat(${heads}, minmax(.9rem, 1.6rem))`;
  const show = (layer, head) => {
    for (const cell of grid.children) cell.setAttribute("aria-pressed", cell.dataset.at === layer + "," + head);
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
    cell.dataset.at = l + "," + h; cell.title = cell.ariaLabel = `Layer ${l}, head ${h}`;
    cell.style.background = `rgba(var(--rgb), ${(0.08 + 0.92 * Math.max(...head)).toFixed(3)})`;
    cell.addEventListener("click", () => show(...(place = [l, h])));
    grid.append(cell);
  }));
  show(...(weights[place[0]]?.[place[1]] ? place : [weights.length - 1, 0]));
}

// Underline what stands word for word in the training text.
async function showCopied({ tokens, marks }) {
  const own = tokens.filter(token => !token.prompt), { runs } = await backend.ask("copied", { tokens: own.map(token => token.id) });
  const copied = new Set(runs.flatMap(([start, end]) => own.slice(start, end)));
  for (const [mark, token] of marks) mark.classList.toggle("copied", copied.has(token));
  const longest = Math.max(0, ...runs.map(([start, end]) => end - start));
  $("copied").textContent = `${copied.size} of ${own.length} tokens are copied` + (longest ? `, the longest run ${longest}` : "");
}

function drawTraining() {
  const svg = $("curve"), left = 32, right = svg.clientWidth - 16, bottom = svg.clientHeight - 18, step = moment();
  const losses = training.train.map(point => point[1]), last = Math.max(...training.snapshots);
  const most = Math.max(...losses), least = Math.min(...losses);
  const x = step => (left + (right - left) * Math.log1p(step) / Math.log1p(last)).toFixed(1);
  const y = loss => (5 + (bottom - 10) * (most - loss) / (most - least || 1)).toFixed(1);
  $("when").value = step === undefined ? backend.own : `step ${step}`;
  svg.replaceChildren();
  if (!losses.length) return;
  const draw = (name, attributes, textContent = "") => {
    const shape = document.createElementNS(svg.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
    svg.append(Object.assign(shape, { textContent }));
  };
  for (const loss of [most, least]) draw("text", { y: Number(y(loss)) + 4 }, loss.toFixed(2));
  for (let tick = 1; tick <= last; tick *= 10) {
    draw("line", { x1: x(tick), x2: x(tick), y2: bottom });
    draw("text", { "text-anchor": "middle", x: x(tick), y: bottom + 14 }, tick);
  }
  draw("path", { d: "M" + training.train.map(([step, loss]) => `${x(step)} ${y(loss)}`).join("L") });
  const loss = training.train.find(point => point[0] === step)?.[1];
  if (loss === undefined) return;
  $("when").value += `, training loss ${loss.toFixed(2)}`;
  draw("circle", { r: 5, cx: x(step), cy: y(loss) });
}

// Write the text anew with the weights at the slider's place.
function watch() {
  drawTraining();
  if (running) { again = true; running.abort(); } else if (!about?.chat || turns.length) generate();
}

function setPlaying(on) {
  playing = on;
  $("play").textContent = on ? "Pause" : "Play";
}

function playNext() {
  const at = Number($("moment").value);
  if (playing && at >= training.snapshots.length - 1) setPlaying(false);
  if (playing) { $("moment").value = at + 1; watch(); }
}

// Look for new snapshots while the run trains; the slider stays at its step, at the newest or at the right end.
async function follow() {
  const next = document.hidden ? null : await backend.ask("training").catch(() => null);
  const before = training.snapshots, at = Number($("moment").value), newest = at === before.length - 1;
  training = next ?? training;
  const steps = training.snapshots, same = steps.findIndex(step => step >= before[at]);
  $("training").hidden = !steps.length;
  $("moment").max = steps.length;
  $("moment").value = at >= before.length || same < 0 ? steps.length : newest ? steps.length - 1 : same;
  if (newest && steps.at(-1) !== before.at(-1)) watch(); else drawTraining();
  clearTimeout(timer);
  const refused = !$("key_field").hidden && !$("key").value;
  if (backend.live && !refused && (steps.length || !next)) timer = setTimeout(follow, 3000);
}

$("moment").addEventListener("input", watch);
$("play").addEventListener("click", () => {
  setPlaying(!playing);
  if (playing && moment() !== undefined && moment() !== training.snapshots.at(-1)) playNext();
  else if (playing) { $("moment").value = 0; watch(); }
});
addEventListener("resize", drawTraining);

$("generate").addEventListener("click", generate);
$("halt").addEventListener("click", () => { setPlaying(false); running?.abort(); });
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
$("key").addEventListener("change", () => follow().then(describe).catch(showError));

function start() {
  $("following").hidden = !backend.live;
  $("error").textContent = "";
  describe().catch(showError);
  follow();
}

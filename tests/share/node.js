// Runs the scripts of an exported file in node: `node node.js FILE` reads a JSON list of [name, arguments] from stdin
// and prints the results, a list. A name is a method of the file's Writer, or one of those below.
"use strict";
const html = require("fs").readFileSync(process.argv[2], "utf8");
require("vm").runInThisContext(html.match(/<script id="engine">([^]*?)<\/script>/)[1] + ";globalThis.here = { FILE, Writer, draw, uniform, TextStream, tokensOfLastWord }");
const writer = new here.Writer(here.FILE);

const others = {
  encode: texts => texts.map(text => writer.tokenizer.encode(text)),
  name: id => writer.tokenizer.name(id),
  timed: (method, given) => {
    const start = performance.now();
    const result = writer.tokenizer[method](given);
    return [result, (performance.now() - start) / 1000];
  },
  healed: texts => texts.map(text => here.tokensOfLastWord(writer.tokenizer, text, writer.tokenizer.encode(text))),
  pieces: (ids, stop) => {
    const stream = new here.TextStream(writer.tokenizer, stop);
    return [...ids.map(id => stream.feed(id)), stream.close()];
  },
  draws: (logits, settings, seen, numbers) => numbers.map(number => here.draw(Float32Array.from(logits), settings, seen, number)),
  numbers: (seed, count) => Array.from({ length: count }, (_, number) => here.uniform(seed, number)),
  logits: async (ids, snapshot) => {
    const rows = [];
    for (let end = 1; end <= ids.length; end++) rows.push(Array.from(await writer.read(writer.window(ids.slice(0, end)), snapshot)));
    return rows;
  },
  last: async (ids, snapshot) => Array.from(await writer.read(ids, snapshot)),
  text: async form => {
    const choices = [];
    await writer.complete(form, choice => choices.push(choice), () => false);
    return choices;
  },
  interrupted: async form => {
    const choices = [], ids = [...form.prompt], looks = [];
    await writer.complete(form, choice => {
      choices.push(choice);
      ids.push(...choice.logprobs.token_ids);
      looks.push(...[ids.slice(0, 2), [9, 8, 7, ids.length]].map(prompt => writer.attention({ prompt, tokens: [] })));
    }, () => false);
    await Promise.all(looks);
    return choices;
  },
  broken: async (method, given) => {
    try { await writer[method](given); } catch (error) { return error.message; }
  },
};

async function main() {
  const blocks = [...html.matchAll(/<script type="text\/plain" id="block\d+">(.*?)<\/script>/g)].map(found => found[1]);
  const asked = JSON.parse(require("fs").readFileSync(0, "utf8"));
  for (const text of blocks) if (asked[0]?.[0] !== "broken") await writer.load({ text });
  const results = [];
  for (const [name, ...given] of asked) results.push(await (others[name] ? others[name](...given) : writer[name](...given)));
  process.stdout.write(JSON.stringify(results));
}
main();

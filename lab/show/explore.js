"use strict";
const data = JSON.parse(document.getElementById("mini-lab-laws").textContent);
const PREFILL = "prefill", DECODE = "decode";

// The cost of a step (lab/core/cost.py): n tokens of each user after `past`, `outputs` of all tokens with logits.
function attended(heads, n, past) {
  const window = heads.window || past + n, growing = Math.min(n, Math.max(0, window - past));
  const pairs = growing * past + growing * (growing + 1) / 2 + (n - growing) * window;
  return {pairs, positions: Math.min(past + n, window + n - 1)};
}

function cost(shape, n, past, outputs, users = 1) {
  const all = n * users;
  let weights = shape.vectors, cache = 0, seen = 0, attention = 0, flops = shape.flops[0] * all + shape.flops[1] * outputs;
  for (const [share, own, last] of shape.weights) {
    weights += own * (1 - (1 - share) ** all) + last * (1 - (1 - share) ** outputs);
  }
  for (const heads of shape.heads) {
    const {pairs, positions} = attended(heads, n, past);
    attention += users * heads.work * pairs;
    seen += users * heads.kv * pairs;
    cache += heads.kv * (users * positions + all);
  }
  flops += attention;
  return {weights, cache, seen, attention, flops, bytes: weights + cache};
}

// A value between points [x, value], straight on logarithms; the nearest outside of them (step_kernels._between).
function between(points, x) {
  let above = points.findIndex(point => point[0] >= x);
  if (above < 0) above = points.length - 1;
  if (above === 0 || points[above][0] <= x) return points[above][1];
  const [a, b] = [points[above - 1], points[above]];
  return mix((Math.log(x) - Math.log(a[0])) / (Math.log(b[0]) - Math.log(a[0])), a[1], b[1]);
}
const mix = (share, a, b) => Math.exp((1 - share) * Math.log(a) + share * Math.log(b));

function attentionSeconds(law, shape, n, past, users) {
  let seconds = 0;
  shape.heads.forEach((heads, i) => {
    const {pairs, positions} = attended(heads, n, past);
    const bySize = law.attention[i][n * users > 1 ? 1 : 0].map(([size, points]) => [size, between(points, positions)]);
    seconds += users * heads.work * pairs * between(bySize, n);
  });
  return seconds;
}

// A phase from kernels and a fit (prediction.here; steps of several users as StepPrediction has them).
function measuredPhase(law, shape, phase, length, steps, users, cached) {
  let kernels = 0, attention = 0, limit = 0, arithmetic = 0, traffic = 0, tokens = 0;
  for (const [n, past, outputs] of steps) {
    const work = cost(shape, n, past, outputs, users), attending = attentionSeconds(law, shape, n, past, users);
    const times = [work.flops / law.gflops / 1e9, work.bytes / law.gbps / 1e9];
    kernels += attending + (users > 1 ? law.users[users - 1] : outputs ? law.last[n - 1] : law.full);
    attention += attending;
    arithmetic += times[0];
    traffic += times[1];
    limit += Math.max(...times);
    tokens += n * users;
  }
  const fit = law.fit;
  const own = fit[phase], share = phase === PREFILL ? 1 : Math.min(1, Math.log(users) / Math.log(Math.max(2, shape.ubatch)));
  const factor = mix(share, fit.decode.factor, fit.prefill.factor), setup = mix(share, fit.decode.own, fit.prefill.own);
  const rest = shape.layers * (fit.step * steps.length + fit.value * tokens * shape.width);
  const expected = Math.max(limit, kernels, setup * (factor * kernels + rest));
  let variance = own.variance, beyond = own.beyond || users > 1 || cached > 0;
  if (length > data.near * own.longest) {
    variance += Math.log2(length / own.longest) * own.longer;
    beyond = true;
  }
  if (length * data.near < own.shortest) {
    variance += Math.log2(own.shortest / Math.max(1, length)) * own.shorter;
    beyond = true;
  }
  const wide = Math.exp(data.deviations * Math.sqrt(variance)), by = limitedBy(expected, kernels, attention, arithmetic, traffic);
  if (cached) return {limit, expected, low: null, high: null, beyond, by};
  return {limit, expected, low: Math.max(limit, expected / wide * own.fastest), high: expected * wide, beyond, by};
}

function limitedBy(seconds, kernels, attention, arithmetic, traffic) { // roofline._limit
  if (seconds - kernels > data.shares[0] * seconds) return "overhead";
  if (attention > data.shares[1] * kernels) return "attention";
  if (kernels > data.shares[2] * Math.max(arithmetic, traffic)) return "the kernel";
  return arithmetic > traffic ? "arithmetic" : "memory traffic";
}

// A phase from a datasheet (datasheet.times); null where it is not predicted. A cached part is not
// computed again. A step of several users takes longer by the same law, with its bytes and FLOPs (prediction.for_users).
function datasheetPhase(law, shape, phase, length, cached, users) {
  const bandwidth = law.gbps * 1e9, over = flops => law.peak ? flops / law.peak / 1e12 : 0;
  const known = law[phase], isPrompt = phase === PREFILL;
  if (!known || isPrompt && !law.peak) return null;
  // Seconds at the datasheet's rates, in the order of published.PARTS.
  const ofToken = (work, flops) => [over(flops), work.weights / bandwidth, 0, work.cache / bandwidth, 1e-6 * shape.layers];
  const least = parts => Math.max(parts[0] + parts[2], parts[1] + (isPrompt ? 0 : parts[3]));
  const sum = (all, each) => all.reduce((total, value, i) => total + value * each[i], 0);
  const time = parts => Math.max(least(parts), sum(known.parts, parts));
  let parts, by = "memory traffic", slower = 1, bound;
  if (isPrompt) {
    const count = length - cached, n = Math.ceil(count / shape.ubatch), whole = cost(shape, count, cached, 1);
    const weights = n * cost(shape, Math.min(count, shape.ubatch), 0, 1).weights / bandwidth;
    const cache = whole.seen / data.published.tile / bandwidth;
    parts = [over(whole.flops - whole.attention), weights, over(whole.attention), cache, 1e-6 * n * shape.layers];
    bound = least(parts);
    if (over(whole.flops) > weights) by = "arithmetic";
  } else {
    const token = cost(shape, 1, length, 1), all = cost(shape, 1, length, users, users);
    parts = ofToken(token, 0);
    bound = token.bytes / bandwidth;
    if (users > 1) {
      const [one, many] = [token, all].map(work => ofToken(work, work.flops)).map(time);
      slower = many / one;
      bound = Math.max(all.bytes / bandwidth, over(all.flops));
      if (over(all.flops) > all.bytes / bandwidth) by = "arithmetic";
    }
  }
  const one = time(parts), expected = Math.max(bound, slower * one);
  if (cached) return {limit: bound, expected, low: null, high: null, beyond: true, by};
  const seconds = parts.map((part, i) => part * known.parts[i]), total = seconds.reduce((a, b) => a + b);
  let variance = (data.published.perLength * Math.max(0, Math.log(length / data.published.longest))) ** 2;
  for (const [deviation, counts] of known.unknown) variance += (deviation * sum(counts, seconds) / total) ** 2;
  const [from, to] = data.published.widens, share = Math.min(1, Math.max(0, Math.log(length / from) / Math.log(to / from)));
  const ends = known.ends.map(([short, long]) => short + share * (long - short));
  const [low, high] = ends.map(end => Math.exp(Math.hypot(end, data.published.sure * Math.sqrt(variance))));
  return {limit: bound, expected, low: Math.max(bound, slower * Math.max(least(parts), one / low)), high: slower * one * high, beyond: true, by};
}

// What a request takes. A prompt with a cached part has no range: the runs behind it have none. A step of several users has
// the range of one user.
function prefillAt(law, shape, length, cached) {
  if (!law.last) return datasheetPhase(law, shape, PREFILL, length, cached, 1);
  const steps = [], n = length - cached;
  for (let first = 0; first < n; first += shape.ubatch) {
    const size = Math.min(shape.ubatch, n - first);
    steps.push([size, cached + first, first + size === n ? 1 : 0]);
  }
  return measuredPhase(law, shape, PREFILL, length, steps, 1, cached);
}

function decodeAt(law, shape, position, users) {
  if (!law.last) return datasheetPhase(law, shape, DECODE, position, 0, users);
  return measuredPhase(law, shape, DECODE, position, [[1, position, users]], users, 0);
}

function memoryOf(shape, tokens, users) {
  const points = shape.context, n = Math.ceil(tokens / 256) * 256, above = Math.max(1, points.findIndex(point => point[0] >= n));
  const [a, b] = [points[above - 1], points[above]], share = (n - a[0]) / (b[0] - a[0]);
  const rows = Math.min(shape.rows, users * n) / Math.min(shape.rows, n); // of the largest step: no more than the context
  const [cache, compute] = [[1, 1], [2, rows]].map(([i, times]) => Math.round(times * (a[i] + share * (b[i] - a[i]))));
  return {weights: shape.file, cache: users * cache, compute, total: shape.file + users * cache + compute};
}

function request(asked) {
  const law = data.laws[asked.device][asked.model], shape = data.shapes[law.shape];
  const middle = asked.prompt + Math.floor(Math.max(0, asked.gen - 2) / 2);
  const memory = memoryOf(shape, asked.prompt + asked.gen, asked.users);
  if (law.why) return {law, shape, middle, memory, prefill: null, decode: null};
  const prefill = prefillAt(law, shape, asked.prompt, asked.cached), decode = decodeAt(law, shape, middle, asked.users);
  return {law, shape, middle, memory, prefill, decode};
}

// Words
const digits = value => value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3);
const whole = value => value.toLocaleString("en");
const seconds = value => value >= 1 ? `${digits(value)} s` : `${digits(1e3 * value)} ms`;
const tick = value => value >= 1 ? `${whole(+value.toPrecision(3))} s` : `${+(1e3 * value).toPrecision(3)} ms`;
const gigabytes = value => value >= 1e9 ? `${digits(value / 1e9)} GB` : `${digits(value / 1e6)} MB`;
const middleOf = phase => phase.expected ?? Math.sqrt(phase.low * phase.high);
const timed = phase => (phase.expected === null ? "" : seconds(phase.expected))
  + (phase.low === null ? "" : phase.expected === null ? `${seconds(phase.low)} to ${seconds(phase.high)}`
    : ` (${seconds(phase.low)} to ${seconds(phase.high)})`);

const why = {
  "memory traffic": "reading weights and cache from memory",
  arithmetic: "arithmetic",
  attention: "attention, which takes more than half of the time",
  "the kernel": "the kernel of the quantization, which is slower than memory and arithmetic allow",
  overhead: "overhead: more than half of the time passes outside the large kernels",
};
const limits = phase => phase.by ? `; limited by ${why[phase.by]}` : "";

// Pictures
const SVG = "http://www.w3.org/2000/svg";
function put(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// Four steps from 0 to a round number that is not below the highest, or the powers of ten around a range.
function ticksOf(lowest, highest, isLog) {
  if (!isLog) {
    const round = 10 ** Math.floor(Math.log10(highest)) / 2.5, end = Math.ceil(highest / round) * round;
    return [0, 1, 2, 3, 4].map(i => end * i / 4);
  }
  const first = Math.floor(Math.log10(lowest)), last = Math.max(first + 1, Math.ceil(Math.log10(highest)));
  return Array.from({length: last - first + 1}, (_, i) => 10 ** (first + i));
}

function curve(svg, title, xs, at, here, points, isLog, unit) {
  const found = xs.map(x => [x, at(x)]), room = {left: 58, right: 408, top: 14, bottom: 226};
  const all = found.flatMap(([, y]) => [y.low ?? middleOf(y), y.high ?? middleOf(y)]).concat(points.map(point => point[1]));
  const across = ticksOf(xs[0], xs[xs.length - 1], isLog), up = ticksOf(Math.min(...all), Math.max(...all), isLog);
  const scale = isLog ? Math.log : x => x;
  const place = (value, ticks, start, end) => {
    const [from, to] = [ticks[0], ticks[ticks.length - 1]].map(scale);
    return (start + (end - start) * (scale(value) - from) / (to - from)).toFixed(1);
  };
  const x = value => place(value, across, room.left, room.right), y = value => place(value, up, room.bottom, room.top);
  svg.replaceChildren();
  for (const value of up) {
    put(svg, "path", {class: "grid", d: `M${room.left} ${y(value)}H${room.right}`});
    put(svg, "text", {x: room.left - 6, y: +y(value) + 4, "text-anchor": "end"}, value ? tick(value) : "0");
  }
  across.forEach((value, i) => {
    const anchor = i === across.length - 1 ? "end" : "middle";
    put(svg, "text", {x: x(value), y: room.bottom + 18, "text-anchor": anchor}, whole(Math.round(value)));
  });
  put(svg, "text", {x: (room.left + room.right) / 2, y: room.bottom + 38, "text-anchor": "middle"}, unit);
  found.slice(1).forEach(([right, end], i) => {
    const [left, start] = found[i], far = start.beyond || end.beyond ? " far" : "";
    if (start.low !== null && end.low !== null) {
      put(svg, "path", {class: `band${far}`, d: `M${x(left)} ${y(start.low)}L${x(right)} ${y(end.low)} ${x(right)} ${y(end.high)} ${x(left)} ${y(start.high)}Z`});
    }
    if (start.expected !== null && end.expected !== null) {
      put(svg, "path", {class: `line${far}`, d: `M${x(left)} ${y(start.expected)}L${x(right)} ${y(end.expected)}`});
    }
  });
  for (const [at, value] of points) {
    if (at >= across[0] && at <= across[across.length - 1]) put(svg, "circle", {class: "point", cx: x(at), cy: y(value), r: 4});
  }
  const [now, value] = here;
  put(svg, "path", {class: "guide", d: `M${x(now)} ${room.top}V${room.bottom}`});
  put(svg, "circle", {class: "here", cx: x(now), cy: y(middleOf(value)), r: 6});
  svg.setAttribute("aria-label", `${title}: ${[found[0], [now, value], found[found.length - 1]]
    .map(([x, y]) => `${timed(y)} at ${whole(Math.round(x))} tokens`).join(", ")}. ${points.length} measured points.`);
}

function bar(svg, parts, end) {
  svg.replaceChildren();
  let from = 0;
  for (const [name, size] of parts) {
    const width = 840 * size / end;
    put(svg, "rect", {class: name.replace(" ", "-"), x: from, y: 0, width: Math.max(0, width), height: 34});
    from += width;
  }
  svg.setAttribute("aria-label", parts.map(([name, size]) => `${name} ${digits(100 * size / end)} %`).join(", "));
}

// The page
const byId = id => document.getElementById(`explore-${id}`);
const inputs = Object.fromEntries(["device", "model", "prompt", "gen", "users", "cached"].map(name => [name, byId(name)]));
const lengths = {prompt: twoDigits(1, data.most.prompt), gen: twoDigits(2, data.most.gen)};

// The numbers of at most two digits and zeros between two numbers, and the last one: the places of a slider.
function twoDigits(first, last) {
  const found = [];
  for (let n = first; n < last; n += Math.max(1, 10 ** (String(n).length - 2))) found.push(n);
  return [...found, last];
}

function asked() {
  const [prompt, gen] = ["prompt", "gen"].map(name => lengths[name][inputs[name].value]);
  return {device: +inputs.device.value, model: +inputs.model.value, prompt, gen,
    users: +inputs.users.value, cached: Math.min(prompt - 1, Math.floor(prompt * inputs.cached.value / 100))};
}

function say(name, text) {
  byId(`${name}-is`).textContent = text;
  inputs[name].setAttribute("aria-valuetext", text);
}

function facts(rows) {
  byId("facts").replaceChildren(...rows.flatMap(([name, text]) => {
    const [term, is] = [document.createElement("dt"), document.createElement("dd")];
    [term.textContent, is.textContent] = [name, text];
    return [term, is];
  }));
}

// What a reader must know of where the figures come from.
function notesOf({users, cached}, {law, memory, prefill, decode}, device) {
  const own = data.laws[0][0], notes = [];
  if (law.why) notes.push(law.why);
  else if (own.why && device !== data.devices[0]) notes.push(`${data.devices[0].name} is not predicted. ${own.why}.`);
  if (law.gbps && !law.last) {
    notes.push("Predicted from the datasheet. Nothing was measured on this device.");
    if (!prefill) notes.push("The datasheet has no peak of arithmetic, so prefill is not predicted.");
  } else if ([prefill, decode].some(one => one && one.beyond)) notes.push("Grey: beyond what was measured.");
  if (law.doubts) notes.push(law.doubts);
  if (decode && users > 1) {
    notes.push(law.last ? "The range for several users is as wide as for one; the runs behind it had one. Measure it: lab batch."
      : "Assumed: a step of several users reaches the same share of the datasheet's figures as a step of one.");
  }
  if (prefill && cached) {
    notes.push((prefill.low === null ? "Prefill has no range. " : "") + "The runs behind it had nothing cached. Measure it: lab turns.");
  }
  if (device.memory && memory.total > device.memory) {
    notes.push(`This does not fit: it needs ${gigabytes(memory.total)} of ${gigabytes(device.memory)}.`);
  }
  return notes.join(" ");
}

function update() {
  const chosen = asked(), found = request(chosen), {law, shape, memory, prefill, decode} = found, {users, cached} = chosen;
  const device = data.devices[chosen.device];
  say("prompt", `${whole(chosen.prompt)} tokens`);
  say("gen", `${whole(chosen.gen)} tokens`);
  say("users", whole(users));
  say("cached", `${whole(cached)} (${inputs.cached.value} %)`);
  byId("note").textContent = notesOf(chosen, found, device);
  byId("chosen").textContent = `${device.name}, ${data.models[chosen.model]}: a prompt of ${whole(chosen.prompt)} tokens `
    + `(${whole(cached)} cached), an answer of ${whole(chosen.gen)}, ${users > 1 ? `${users} users` : "one user"}.`;
  byId("request").hidden = byId("prefill-figure").hidden = !prefill;
  byId("decode-figure").hidden = !decode;
  const rows = device.about ? [["device", device.about]] : [];
  if (prefill) rows.push(["prefill", `${timed(prefill)}${limits(prefill)}`]);
  if (decode) {
    const step = middleOf(decode);
    rows.push(["time per output token", `${timed(decode)}${limits(decode)}`]);
    rows.push(["tokens per second", `${digits(1 / step)} for one user` + (users > 1 ? `, ${digits(users / step)} for all ${users}` : "")]);
  }
  rows.push(["memory", `${gigabytes(memory.total)}${device.memory ? ` of ${gigabytes(device.memory)}` : ""}: weights ${gigabytes(memory.weights)}, `
    + `KV cache ${gigabytes(memory.cache)}, compute buffer ${gigabytes(memory.compute)}`]);
  const answer = decode && (chosen.gen - 1) * middleOf(decode), plain = users === 1 && !cached && law.fit;
  let said = decode ? `Predicted: the tokens of the answer take ${seconds(answer)}.` : "There is no prediction for this choice.";
  if (prefill) {
    const first = middleOf(prefill), waits = (users - 1) * first, total = first + waits + answer;
    said = `Predicted: ${users > 1 ? `${users} users send at once; each waits ${seconds(waits)} while the prompts of the others are prefilled, ` : ""}`
      + `the ${cached ? "rest of the prompt" : "prompt"} takes ${seconds(first)}, the answer ${seconds(answer)}: ${seconds(total)} in all.`;
    bar(byId("bar"), [[PREFILL, first], ["waiting", waits], [DECODE, answer]], total);
    const most = data.most.prompt, xs = Array.from({length: 61}, (_, i) => cached + Math.round((most - cached) ** (i / 60)));
    curve(byId("prefill"), "Prefill time over prompt length", [...new Set(xs)], n => prefillAt(law, shape, n, cached),
      [chosen.prompt, prefill], plain ? law.fit.prefill.points : [], true, "tokens of the prompt");
  }
  if (decode) {
    const end = ticksOf(0, data.most.prompt + data.most.gen, false)[4];
    curve(byId("decode"), "Time per output token over position", Array.from({length: 41}, (_, i) => Math.round(end * i / 40)),
      n => decodeAt(law, shape, n, users), [found.middle, decode], plain ? law.fit.decode.points : [], false,
      "position: tokens before this one");
  }
  bar(byId("memory"), [["weights", memory.weights], ["cache", memory.cache], ["compute buffer", memory.compute]],
    Math.max(memory.total, device.memory || 0));
  facts(rows);
  byId("said").textContent = said;
}

data.models.forEach((name, i) => inputs.model.add(new Option(name, i)));
for (const name of new Set(data.devices.map(device => device.group))) {
  const group = document.createElement("optgroup");
  group.label = name;
  data.devices.forEach((device, i) => device.group === name && group.append(new Option(device.name, i)));
  inputs.device.append(group);
}
for (const name in lengths) {
  inputs[name].max = lengths[name].length - 1;
  inputs[name].value = Math.max(0, lengths[name].indexOf(data.start[name]));
}
inputs.users.max = data.most.users;
inputs.device.value = Math.max(0, data.laws.findIndex(([law]) => law.last || law.peak));
for (const input of Object.values(inputs)) input.addEventListener("input", update);
byId("part").hidden = false;
update();

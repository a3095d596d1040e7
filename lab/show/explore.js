"use strict";
// The explorable part of a page: it predicts requests from the laws in the page, as `lab predict` does.
const data = JSON.parse(document.getElementById("mini-lab-laws").textContent);
const PREFILL = "prefill";
const DECODE = "decode";

// ---- The cost of a step (lab/core/cost.py) ----

// What the tokens of one user see in a layer: pairs of a token and a position, and positions that are read.
function attended(heads, tokens, past) {
  const window = heads.window || past + tokens;
  const growing = Math.min(tokens, Math.max(0, window - past));
  const pairs = growing * past + growing * (growing + 1) / 2 + (tokens - growing) * window;
  return {pairs, positions: Math.min(past + tokens, window + tokens - 1)};
}

// A step with `tokens` of each user after `past`; `outputs` of all tokens get logits.
function cost(shape, tokens, past, outputs, users = 1) {
  const allTokens = tokens * users;
  let weights = shape.vectors;
  for (const [share, bytes, outputBytes] of shape.weights) {
    weights += bytes * (1 - (1 - share) ** allTokens) + outputBytes * (1 - (1 - share) ** outputs);
  }
  let cache = 0;
  let seen = 0;
  let attention = 0;
  for (const heads of shape.heads) {
    const {pairs, positions} = attended(heads, tokens, past);
    attention += users * heads.work * pairs;
    seen += users * heads.kv * pairs;
    cache += heads.kv * (users * positions + allTokens);
  }
  const flops = shape.flops[0] * allTokens + shape.flops[1] * outputs + attention;
  return {weights, cache, seen, attention, flops, bytes: weights + cache};
}

// ---- A measured machine (Here and StepPrediction in lab/roofline) ----

// The value at this share of the way between the logarithms of two values.
function logMean(share, low, high) {
  return Math.exp((1 - share) * Math.log(low) + share * Math.log(high));
}

// The value at x of points [x, value], straight on logarithms; outside of them that of the nearest.
function interpolated(points, x) {
  let above = points.findIndex(point => point[0] >= x);
  if (above < 0) above = points.length - 1;
  const [right, rightValue] = points[above];
  if (above === 0 || right <= x) return rightValue;
  const [left, leftValue] = points[above - 1];
  const share = (Math.log(x) - Math.log(left)) / (Math.log(right) - Math.log(left));
  return logMean(share, leftValue, rightValue);
}

function attentionSeconds(law, shape, tokens, past, users) {
  const isOneToken = tokens * users === 1;
  let seconds = 0;
  shape.heads.forEach((heads, i) => {
    const {pairs, positions} = attended(heads, tokens, past);
    const byTokens = law.attention[i][isOneToken ? 0 : 1].map(
      ([size, points]) => [size, interpolated(points, positions)]);
    seconds += users * heads.work * pairs * interpolated(byTokens, tokens);
  });
  return seconds;
}

function weightSeconds(law, tokens, outputs, users) {
  if (users > 1) return law.users[users - 1];
  return outputs ? law.last[tokens - 1] : law.full;
}

// The least times of some steps: of their kernels, and by the machine's best rates.
function leastTimes(law, shape, steps, users) {
  const times = {kernels: 0, attention: 0, limit: 0, arithmetic: 0, traffic: 0, tokens: 0};
  for (const [tokens, past, outputs] of steps) {
    const work = cost(shape, tokens, past, outputs, users);
    const attention = attentionSeconds(law, shape, tokens, past, users);
    const arithmetic = work.flops / law.gflops / 1e9;
    const traffic = work.bytes / law.gbps / 1e9;
    times.kernels += attention + weightSeconds(law, tokens, outputs, users);
    times.attention += attention;
    times.arithmetic += arithmetic;
    times.traffic += traffic;
    times.limit += Math.max(arithmetic, traffic);
    times.tokens += tokens * users;
  }
  return times;
}

// How far beyond what was measured a length lies, in doublings.
function doublings(ofPhase, length) {
  let longer = 0;
  let shorter = 0;
  if (length > data.near * ofPhase.longest) longer = Math.log2(length / ofPhase.longest);
  if (length * data.near < ofPhase.shortest) shorter = Math.log2(ofPhase.shortest / Math.max(1, length));
  return {longer, shorter};
}

function measuredPhase(law, shape, phase, length, steps, users, cached) {
  const fit = law.fit;
  const times = leastTimes(law, shape, steps, users);
  // A step of many users is like one of prefill.
  const share = phase === PREFILL ? 1 : Math.min(1, Math.log(users) / Math.log(Math.max(2, shape.ubatch)));
  const factor = logMean(share, fit.decode.factor, fit.prefill.factor);
  const correction = logMean(share, fit.decode.correction, fit.prefill.correction);
  const layers = shape.layers * (fit.step * steps.length + fit.value * times.tokens * shape.width);
  const fitted = correction * (factor * times.kernels + layers);
  const expected = Math.max(times.limit, times.kernels, fitted);
  const by = limitedBy(expected, times);
  const ofPhase = fit[phase];
  const {longer, shorter} = doublings(ofPhase, length);
  const beyond = ofPhase.beyond || users > 1 || cached > 0 || longer > 0 || shorter > 0;
  if (cached) return {limit: times.limit, expected, low: null, high: null, beyond, by};
  const variance = ofPhase.variance + longer * ofPhase.longer + shorter * ofPhase.shorter;
  const wide = Math.exp(data.deviations * Math.sqrt(variance));
  const low = Math.max(times.limit, expected / wide * ofPhase.fastest);
  return {limit: times.limit, expected, low, high: expected * wide, beyond, by};
}

// What limits a phase (lab/roofline/explanation.py).
function limitedBy(seconds, {kernels, attention, arithmetic, traffic}) {
  const [overheadShare, attentionShare, kernelFactor] = data.shares;
  if (seconds - kernels > overheadShare * seconds) return "overhead";
  if (attention > attentionShare * kernels) return "attention";
  if (kernels > kernelFactor * Math.max(arithmetic, traffic)) return "the kernel";
  return arithmetic > traffic ? "arithmetic" : "memory traffic";
}

// ---- A device of the datasheets (lab/roofline/datasheet.py) ----

// Parts are seconds at the datasheet's rates: arithmetic, weights, attention, cache, layers (datasheet.PARTS).

function peakSeconds(peak, flops) {
  return peak ? flops / peak / 1e12 : 0;
}

function promptParts(law, shape, length, cached) {
  const bandwidth = law.gbps * 1e9;
  const tokens = length - cached;
  const steps = Math.ceil(tokens / shape.ubatch);
  const prompt = cost(shape, tokens, cached, 1);
  const firstStep = cost(shape, Math.min(tokens, shape.ubatch), 0, 1);
  return [
    peakSeconds(law.peak, prompt.flops - prompt.attention),
    steps * firstStep.weights / bandwidth,
    peakSeconds(law.peak, prompt.attention),
    prompt.seen / data.published.tile / bandwidth,
    1e-6 * steps * shape.layers,
  ];
}

function tokenParts(law, shape, work, arithmetic) {
  const bandwidth = law.gbps * 1e9;
  return [arithmetic, work.weights / bandwidth, 0, work.cache / bandwidth, 1e-6 * shape.layers];
}

// Of a processor the longer of multiplying and reading counts, and a little more where both are alike.
function overlapping(law, phase, [multiplying, reading, ...others]) {
  if (!law.overlap || phase === PREFILL) return [multiplying, reading, ...others];
  const powers = [multiplying, reading].map(seconds => seconds ** law.overlap);
  const sum = powers[0] + powers[1];
  const total = sum ** (1 / law.overlap);
  return [...powers.map(power => sum ? total * power / sum : 0), ...others];
}

function expectedSeconds(law, phase, parts) {
  const times = parts.map((part, i) => part * law[phase].parts[i]);
  return overlapping(law, phase, times).reduce((total, seconds) => total + seconds);
}

function leastSeconds(phase, [arithmetic, weights, attention, cache]) {
  return Math.max(arithmetic + attention, phase === PREFILL ? weights : weights + cache);
}

function tokenArithmetic(law, shape, length) {
  return law.overlap ? peakSeconds(law.tokenPeak, cost(shape, 1, length, 1).flops) : 0;
}

function weighted(factors, values) {
  return factors.reduce((total, factor, i) => total + factor * values[i], 0);
}

// The ratios of the range's ends to the expected time (datasheet.Learned.range).
function publishedRange(law, phase, parts, length) {
  const published = law[phase];
  const {perLength, longest, widens: [from, to], sure} = data.published;
  const seconds = overlapping(law, phase, parts.map((part, i) => part * published.parts[i]));
  const total = seconds.reduce((a, b) => a + b);
  let variance = (perLength * Math.max(0, Math.log(length / longest))) ** 2;
  for (const [deviation, counts] of published.unknown) {
    variance += (deviation * weighted(counts, seconds) / total) ** 2;
  }
  const share = Math.min(1, Math.max(0, Math.log(length / from) / Math.log(to / from)));
  const [low, high] = published.ends.map(([short, long]) =>
    Math.exp(Math.hypot(short + share * (long - short), sure * Math.sqrt(variance))));
  return {low, high};
}

// A step of several users takes longer than that of one by the same law, with its bytes and FLOPs.
function usersStep(law, shape, length, users) {
  const one = cost(shape, 1, length, 1);
  const all = cost(shape, 1, length, users, users);
  const [oneSeconds, allSeconds] = [one, all].map(work => {
    const parts = tokenParts(law, shape, work, peakSeconds(law.tokenPeak, work.flops));
    return Math.max(leastSeconds(DECODE, parts), expectedSeconds(law, DECODE, parts));
  });
  const arithmetic = peakSeconds(law.tokenPeak, all.flops);
  const traffic = all.bytes / (law.gbps * 1e9);
  return {
    slower: allSeconds / oneSeconds,
    limit: Math.max(traffic, arithmetic),
    by: arithmetic > traffic ? "arithmetic" : "memory traffic",
  };
}

// A phase, or null where it is not predicted. A cached part is not computed again.
function datasheetPhase(law, shape, phase, length, cached, users) {
  const published = law[phase];
  const isPrompt = phase === PREFILL;
  if (!published || (isPrompt && !law.peak)) return null;
  const parts = isPrompt ? promptParts(law, shape, length, cached)
    : tokenParts(law, shape, cost(shape, 1, length, 1), tokenArithmetic(law, shape, length));
  const least = leastSeconds(phase, parts);
  let step = {slower: 1, limit: least, by: "memory traffic"};
  if (isPrompt && parts[0] + parts[2] > parts[1]) step.by = "arithmetic";
  if (!isPrompt && users > 1) step = usersStep(law, shape, length, users);
  const {slower, limit, by} = step;
  const one = Math.max(least, expectedSeconds(law, phase, parts));
  const expected = Math.max(limit, slower * one);
  if (cached) return {limit, expected, low: null, high: null, beyond: true, by};
  const range = publishedRange(law, phase, parts, length);
  const low = Math.max(limit, slower * Math.max(least, one / range.low));
  return {limit, expected, low, high: slower * one * range.high, beyond: true, by};
}

// ---- A request ----

// A prompt with a cached part has no range: the runs behind it have none.
function prefillAt(law, shape, length, cached) {
  if (!law.last) return datasheetPhase(law, shape, PREFILL, length, cached, 1);
  const steps = [];
  for (let past = cached; past < length; past += shape.ubatch) {
    const tokens = Math.min(shape.ubatch, length - past);
    steps.push([tokens, past, past + tokens === length ? 1 : 0]);
  }
  return measuredPhase(law, shape, PREFILL, length, steps, 1, cached);
}

// A step of several users has the range of one user.
function decodeAt(law, shape, position, users) {
  if (!law.last) return datasheetPhase(law, shape, DECODE, position, 0, users);
  return measuredPhase(law, shape, DECODE, position, [[1, position, users]], users, 0);
}

// Bytes of a context of so many tokens for each user, from the points of lab/core/memory.py.
function memoryOf(law, shape, tokens, users) {
  const points = shape.context;
  const padded = Math.ceil(tokens / 256) * 256;
  const above = Math.max(1, points.findIndex(point => point[0] >= padded));
  const [left, right] = [points[above - 1], points[above]];
  const share = (padded - left[0]) / (right[0] - left[0]);
  const between = i => left[i] + share * (right[i] - left[i]);
  // The largest step has no more tokens than the context.
  const rows = Math.min(shape.rows, users * padded) / Math.min(shape.rows, padded);
  const cache = users * Math.round(between(1));
  const compute = Math.round(rows * between(2));
  const weights = law.resident || shape.file;
  return {weights, cache, compute, total: weights + cache + compute};
}

function request({device, model, prompt, gen, users, cached}) {
  const law = data.laws[device][model];
  const shape = data.shapes[law.shape];
  const middle = prompt + Math.floor(Math.max(0, gen - 2) / 2);
  const memory = memoryOf(law, shape, prompt + gen, users);
  let prefill = null;
  let decode = null;
  if (!law.why) {
    prefill = prefillAt(law, shape, prompt, cached);
    decode = decodeAt(law, shape, middle, users);
  }
  return {law, shape, middle, memory, prefill, decode};
}

// The expected time; where there is none, the middle of the range.
function middleOf(phase) {
  return phase.expected ?? Math.sqrt(phase.low * phase.high);
}

// ---- Words ----

const digits = value => value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3);
const whole = value => value.toLocaleString("en");
const seconds = value => value >= 1 ? `${digits(value)} s` : `${digits(1e3 * value)} ms`;
const tick = value => value >= 1 ? `${whole(+value.toPrecision(3))} s` : `${+(1e3 * value).toPrecision(3)} ms`;
const gigabytes = value => value >= 1e9 ? `${digits(value / 1e9)} GB` : `${digits(value / 1e6)} MB`;

function timed(phase) {
  if (phase.low === null) return seconds(phase.expected);
  const range = `${seconds(phase.low)} to ${seconds(phase.high)}`;
  return phase.expected === null ? range : `${seconds(phase.expected)} (${range})`;
}

const LIMITS = {
  "memory traffic": "reading weights and cache from memory",
  arithmetic: "arithmetic",
  attention: "attention, which takes more than half of the time",
  "the kernel": "the kernel of the quantization, which is slower than memory and arithmetic allow",
  overhead: "overhead: more than half of the time passes outside the large kernels",
};

function timedAndLimited(phase) {
  return `${timed(phase)}; limited by ${LIMITS[phase.by]}`;
}

// The prediction in a sentence.
function answerOf({gen, users, cached}, {prefill, decode}) {
  if (!decode) return "There is no prediction for this choice.";
  const answer = (gen - 1) * middleOf(decode);
  if (!prefill) return `Predicted: the tokens of the answer take ${seconds(answer)}.`;
  const prompt = middleOf(prefill);
  const waits = (users - 1) * prompt;
  const total = seconds(prompt + waits + answer);
  const part = cached ? "rest of the prompt" : "prompt";
  if (users > 1) {
    return `Predicted: ${users} users send at once; each waits ${seconds(waits)} while the prompts of the others are `
      + `prefilled, the ${part} takes ${seconds(prompt)}, the answer ${seconds(answer)}: ${total} in all.`;
  }
  return `Predicted: the ${part} takes ${seconds(prompt)}, the answer ${seconds(answer)}: ${total} in all.`;
}

// What a reader must know of where the figures come from.
function notesOf({users, cached}, {law, memory, prefill, decode}, device) {
  const measured = data.devices[0];
  const reason = data.laws[0][0].why;
  const notes = [];
  if (law.why) notes.push(law.why);
  else if (reason && device !== measured) notes.push(`${measured.name} is not predicted. ${reason}.`);
  if (law.gbps && !law.last) {
    notes.push("Predicted from the datasheet. Nothing was measured on this device.");
    if (!prefill) notes.push("The datasheet has no peak of arithmetic, so prefill is not predicted.");
  } else if (prefill?.beyond || decode?.beyond) {
    notes.push("Grey: beyond what was measured.");
  }
  if (law.doubts) notes.push(law.doubts);
  if (decode && users > 1 && law.last) {
    notes.push("The range for several users is as wide as for one; the runs behind it had one. Measure it: lab batch.");
  } else if (decode && users > 1) {
    notes.push("Assumed: a step of several users reaches the same share of the datasheet's figures as a step of one.");
  }
  if (prefill && cached) {
    if (prefill.low === null) notes.push("Prefill has no range.");
    notes.push("The runs behind it had nothing cached. Measure it: lab turns.");
  }
  if (device.memory && memory.total > device.memory) {
    notes.push(`This does not fit: it needs ${gigabytes(memory.total)} of ${gigabytes(device.memory)}.`);
  }
  return notes.join(" ");
}

function chosenText({model, prompt, gen, users, cached}, device) {
  const who = users > 1 ? `${users} users` : "one user";
  return `${device.name}, ${data.models[model]}: a prompt of ${whole(prompt)} tokens `
    + `(${whole(cached)} cached), an answer of ${whole(gen)}, ${who}.`;
}

// The list of figures: pairs of a name and a text.
function factsOf({users}, {memory, prefill, decode}, device) {
  const rows = [];
  if (device.about) rows.push(["device", device.about]);
  if (prefill) rows.push(["prefill", timedAndLimited(prefill)]);
  if (decode) {
    const step = middleOf(decode);
    const ofAll = users > 1 ? `, ${digits(users / step)} for all ${users}` : "";
    rows.push(["time per output token", timedAndLimited(decode)]);
    rows.push(["tokens per second", `${digits(1 / step)} for one user${ofAll}`]);
  }
  const available = device.memory ? ` of ${gigabytes(device.memory)}` : "";
  rows.push(["memory", `${gigabytes(memory.total)}${available}: weights ${gigabytes(memory.weights)}, `
    + `KV cache ${gigabytes(memory.cache)}, compute buffer ${gigabytes(memory.compute)}`]);
  return rows;
}

// ---- Pictures ----

const SVG = "http://www.w3.org/2000/svg";
const ROOM = {left: 58, right: 408, top: 14, bottom: 226};
const BAR = {width: 840, height: 34};

function put(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
}

// Four steps from 0 to a round number that is not below the highest.
function evenTicks(highest) {
  const round = 10 ** Math.floor(Math.log10(highest)) / 2.5;
  const end = Math.ceil(highest / round) * round;
  return [0, 1, 2, 3, 4].map(i => end * i / 4);
}

// The powers of ten around a range.
function powersOfTen(lowest, highest) {
  const first = Math.floor(Math.log10(lowest));
  const last = Math.max(first + 1, Math.ceil(Math.log10(highest)));
  return Array.from({length: last - first + 1}, (_, i) => 10 ** (first + i));
}

// Where values lie on an axis between two coordinates.
function axis(ticks, start, end, isLog) {
  const scale = isLog ? Math.log : value => value;
  const from = scale(ticks[0]);
  const to = scale(ticks[ticks.length - 1]);
  return value => (start + (end - start) * (scale(value) - from) / (to - from)).toFixed(1);
}

// A phase over lengths: the line, its range, the measured points, and the request as a circle.
function curve(svg, {title, unit, isLog, xs, at, now, points}) {
  const line = xs.map(x => [x, at(x)]);
  const times = points.map(point => point[1]);
  for (const [, phase] of line) times.push(phase.low ?? middleOf(phase), phase.high ?? middleOf(phase));
  const ends = [xs[0], xs[xs.length - 1], Math.min(...times), Math.max(...times)];
  const across = isLog ? powersOfTen(ends[0], ends[1]) : evenTicks(ends[1]);
  const up = isLog ? powersOfTen(ends[2], ends[3]) : evenTicks(ends[3]);
  const x = axis(across, ROOM.left, ROOM.right, isLog);
  const y = axis(up, ROOM.bottom, ROOM.top, isLog);
  svg.replaceChildren();
  drawAxes(svg, across, up, x, y, unit);
  for (let i = 1; i < line.length; i++) drawSegment(svg, line[i - 1], line[i], x, y);
  for (const [length, time] of points) {
    if (length >= across[0] && length <= across[across.length - 1]) {
      put(svg, "circle", {class: "point", cx: x(length), cy: y(time), r: 4});
    }
  }
  const [length, phase] = now;
  put(svg, "path", {class: "guide", d: `M${x(length)} ${ROOM.top}V${ROOM.bottom}`});
  put(svg, "circle", {class: "here", cx: x(length), cy: y(middleOf(phase)), r: 6});
  const texts = [line[0], now, line[line.length - 1]].map(
    ([n, timeAt]) => `${timed(timeAt)} at ${whole(Math.round(n))} tokens`);
  svg.setAttribute("aria-label", `${title}: ${texts.join(", ")}. ${points.length} measured points.`);
}

function drawAxes(svg, across, up, x, y, unit) {
  for (const value of up) {
    put(svg, "path", {class: "grid", d: `M${ROOM.left} ${y(value)}H${ROOM.right}`});
    put(svg, "text", {x: ROOM.left - 6, y: +y(value) + 4, "text-anchor": "end"}, value ? tick(value) : "0");
  }
  across.forEach((value, i) => {
    const anchor = i === across.length - 1 ? "end" : "middle";
    put(svg, "text", {x: x(value), y: ROOM.bottom + 18, "text-anchor": anchor}, whole(Math.round(value)));
  });
  put(svg, "text", {x: (ROOM.left + ROOM.right) / 2, y: ROOM.bottom + 38, "text-anchor": "middle"}, unit);
}

// The line and the range between two neighbouring lengths.
function drawSegment(svg, [left, start], [right, end], x, y) {
  const far = start.beyond || end.beyond ? " far" : "";
  if (start.low !== null && end.low !== null) {
    const below = `M${x(left)} ${y(start.low)}L${x(right)} ${y(end.low)}`;
    const above = `${x(right)} ${y(end.high)} ${x(left)} ${y(start.high)}Z`;
    put(svg, "path", {class: `band${far}`, d: `${below} ${above}`});
  }
  if (start.expected !== null && end.expected !== null) {
    const d = `M${x(left)} ${y(start.expected)}L${x(right)} ${y(end.expected)}`;
    put(svg, "path", {class: `line${far}`, d});
  }
}

// A bar of parts [name, size]; its whole width is `end`.
function bar(svg, parts, end) {
  svg.replaceChildren();
  let x = 0;
  for (const [name, size] of parts) {
    const width = BAR.width * size / end;
    put(svg, "rect", {class: name.replace(" ", "-"), x, y: 0, width: Math.max(0, width), height: BAR.height});
    x += width;
  }
  svg.setAttribute("aria-label", parts.map(([name, size]) => `${name} ${digits(100 * size / end)} %`).join(", "));
}

// ---- The page ----

const byId = id => document.getElementById(`explore-${id}`);
const inputs = {};
for (const name of ["device", "model", "prompt", "gen", "users", "cached"]) inputs[name] = byId(name);
const lengths = {prompt: twoDigits(1, data.most.prompt), gen: twoDigits(2, data.most.gen)};

// The places of a slider: numbers of at most two digits and zeros between two numbers, and the last one.
function twoDigits(first, last) {
  const places = [];
  for (let n = first; n < last; n += Math.max(1, 10 ** (String(n).length - 2))) places.push(n);
  return [...places, last];
}

// What the reader has chosen.
function asked() {
  const prompt = lengths.prompt[inputs.prompt.value];
  const cached = Math.min(prompt - 1, Math.floor(prompt * inputs.cached.value / 100));
  return {
    device: +inputs.device.value,
    model: +inputs.model.value,
    prompt,
    gen: lengths.gen[inputs.gen.value],
    users: +inputs.users.value,
    cached,
  };
}

function say(name, text) {
  byId(`${name}-is`).textContent = text;
  inputs[name].setAttribute("aria-valuetext", text);
}

function showFacts(rows) {
  const elements = [];
  for (const [name, text] of rows) {
    const term = document.createElement("dt");
    const description = document.createElement("dd");
    term.textContent = name;
    description.textContent = text;
    elements.push(term, description);
  }
  byId("facts").replaceChildren(...elements);
}

function drawPrefill(choice, {law, shape, prefill, decode}) {
  const {prompt, gen, users, cached} = choice;
  const first = middleOf(prefill);
  const waits = (users - 1) * first;
  const answer = (gen - 1) * middleOf(decode);
  bar(byId("bar"), [[PREFILL, first], ["waiting", waits], [DECODE, answer]], first + waits + answer);
  const longest = data.most.prompt - cached;
  const xs = Array.from({length: 61}, (_, i) => cached + Math.round(longest ** (i / 60)));
  curve(byId("prefill"), {
    title: "Prefill time over prompt length",
    unit: "tokens of the prompt",
    isLog: true,
    xs: [...new Set(xs)],
    at: length => prefillAt(law, shape, length, cached),
    now: [prompt, prefill],
    points: hasPoints(choice, law) ? law.fit.prefill.points : [],
  });
}

function drawDecode(choice, {law, shape, middle, decode}) {
  const end = evenTicks(data.most.prompt + data.most.gen)[4];
  curve(byId("decode"), {
    title: "Time per output token over position",
    unit: "position: tokens before this one",
    isLog: false,
    xs: Array.from({length: 41}, (_, i) => Math.round(end * i / 40)),
    at: position => decodeAt(law, shape, position, choice.users),
    now: [middle, decode],
    points: hasPoints(choice, law) ? law.fit.decode.points : [],
  });
}

// Whether the measured points are of requests like this one.
function hasPoints({users, cached}, law) {
  return users === 1 && !cached && law.fit;
}

function update() {
  const choice = asked();
  const device = data.devices[choice.device];
  const prediction = request(choice);
  const {memory, prefill, decode} = prediction;
  say("prompt", `${whole(choice.prompt)} tokens`);
  say("gen", `${whole(choice.gen)} tokens`);
  say("users", whole(choice.users));
  say("cached", `${whole(choice.cached)} (${inputs.cached.value} %)`);
  byId("note").textContent = notesOf(choice, prediction, device);
  byId("chosen").textContent = chosenText(choice, device);
  byId("request").hidden = !prefill;
  byId("prefill-figure").hidden = !prefill;
  byId("decode-figure").hidden = !decode;
  if (prefill) drawPrefill(choice, prediction);
  if (decode) drawDecode(choice, prediction);
  const parts = [["weights", memory.weights], ["cache", memory.cache], ["compute buffer", memory.compute]];
  bar(byId("memory"), parts, Math.max(memory.total, device.memory || 0));
  showFacts(factsOf(choice, prediction, device));
  byId("said").textContent = answerOf(choice, prediction);
}

function addDevices() {
  for (const name of new Set(data.devices.map(device => device.group))) {
    const group = document.createElement("optgroup");
    group.label = name;
    data.devices.forEach((device, i) => {
      if (device.group === name) group.append(new Option(device.name, i));
    });
    inputs.device.append(group);
  }
  const first = data.laws.findIndex(([law]) => law.last || law.peak);
  inputs.device.value = Math.max(0, first);
}

data.models.forEach((name, i) => inputs.model.add(new Option(name, i)));
addDevices();
for (const name in lengths) {
  inputs[name].max = lengths[name].length - 1;
  inputs[name].value = Math.max(0, lengths[name].indexOf(data.start[name]));
}
inputs.users.max = data.most.users;
for (const input of Object.values(inputs)) input.addEventListener("input", update);
byId("part").hidden = false;
update();

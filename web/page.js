// The page: what was chosen, what is drawn from it, what the hand does. crate.js runs the model.
// ---- What was chosen
const all = selector => [...document.querySelectorAll(selector)];
const byId = Object.fromEntries(all("[id]").map(box => [box.id, box]));
const data = JSON.parse(byId.data.textContent);
const c = data.config;
const isText = data.task === "gpt";
const isMae = data.task === "mae";
const [H, P] = [c.image_size, c.patch_size];
const side = H / P;                                             // of the grid of patches
const letters = [...data.characters ?? "", "\ufffd"];           // the last stands for any other
const models = {trained: build(data, "trained"), untrained: build(data, "untrained")};
const middle = 1 + (side + 1) * (side >> 1);                    // the token of the middle patch
const start = {
  kind: "trained", layer: c.layers, eta: c.eta, lambd: c.lambd,
  at: isText ? null : isMae || c.pool === "mean" ? middle : 0,  // a token; null is the last
  entry: null,                                                  // of its code; null is the largest
  off: [], mask: data.masked ?? [],                             // as crate.js has them
};
const chosen = {...start};                                      // and pixels of a picture
let model, L, n;                                                // what is shown: layer L, n tokens
let frame;                                                      // the frame that will show it

// Lists and pixels are replaced, never changed in place: so `run` knows what is new
function set(changes) {
  Object.assign(chosen, changes);
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(draw);
}

function run(model) {                                           // if anything is new
  const {eta, lambd, off, mask, pixels} = chosen;
  const ids = isText ? idsOf(data, byId.text.value || "\n").slice(-c.context) : [];
  const seen = [eta, lambd, off, mask, pixels, `${ids}`];
  if (seen.every((value, i) => value === model.seen?.[i])) return;
  const Z = isText ? embedText(model, ids) : embedPicture(model, data, pixels, new Set(mask));
  forward(model, Z, {eta, lambd, off});
  Object.assign(model, {seen, ids});
}
// ---- What is drawn from it
function draw() {
  model = models[chosen.kind];
  run(model);
  L = model.layers[chosen.layer - 1];
  n = L.T.code.rows;
  chosen.at = Math.min(chosen.at ?? n, n - 1);
  chosen.entry ??= order(own(L.T.code))[0];
  for (const knob of ["layer", "lambd", "eta"])
    byId[knob].nextElementSibling.value = byId[knob].value = chosen[knob];
  byId.untrained.checked = chosen.kind === "untrained";
  isText ? drawText() : drawPicture();
  isMae ? drawGuess() : drawAnswer();
  drawHeads();
  drawCode();
  drawEntry();
}

const clamp = (y, low, high) => Math.min(high, Math.max(low, y));
const order = row => [...row.keys()].sort((a, b) => row[b] - row[a]);
const largest = values => Math.max(1e-9, ...values);            // never 0: one divides by it
const own = M => rowAt(M, chosen.at);                           // of the chosen token
const logits = () => read(model, model.layers.at(-1).T.out);
const visible = letter => ({" ": "␣", "\n": "↵"}[letter] ?? letter);
const percent = share => `${(100 * share).toFixed(1)} %`;

function node(tag, properties, ...inside) {                     // words stay words, never markup
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...inside.flat());
  return element;
}

function put(box, ...inside) {                                  // the same button keeps the focus
  const focused = [...box.querySelectorAll("button")].indexOf(document.activeElement);
  box.replaceChildren(...inside.flat());
  box.querySelectorAll("button")[focused]?.focus({preventScroll: true});
}

const button = (words, ariaPressed, onclick) => node("button", {ariaPressed, onclick}, words);
const note = words => node("small", {}, words);
const character = (i, above, below) => node("span", {className: i === chosen.at ? "at" : "",
  onclick: () => point(i)}, above, node("b", {}, visible(letters[model.ids[i]])), below);
const canvas = pixels => paintCanvas(node("canvas"), H, H, t =>  // of uint8 (H, H, 3)
  [...pixels.subarray(3 * t, 3 * t + 3), 255]);

// A picture with a share, 0 to 1, on each patch; page.css colours it, and frames the chosen patch
function patches(pixels, kind, share) {
  const cells = Array.from({length: side ** 2}, (_, i) =>
    node("i", {style: `opacity: ${share(i)}`}));
  return node("div", {className: `patches ${kind}`}, canvas(pixels), cells);
}

// A value for each token: bars over the characters, or colour on the patches
function view(values) {
  const most = largest(values.slice(isText ? 0 : 1));           // without the class token
  const share = i => clamp((values[i] ?? 0) / most, 0, 1);
  if (!isText) return patches(chosen.pixels, "heat", i => share(i + 1));
  return node("div", {className: "type"}, model.ids.map((_, i) =>
    character(i, node("i", {style: `height: ${1.5 * share(i)}em`}), "")));
}

function drawPicture() {
  const {at, mask, pixels} = chosen;
  const row = 1 + ((at - 1) / side | 0);
  const column = 1 + (at - 1) % side;
  const area = at ? [row, column, row + 1, column + 1] : [1, 1, -1, -1];
  document.body.style = `--side: ${side}; --chosen: ${area.join(" / ")}`;
  put(byId.picture, patches(pixels, "mask", i => +mask.includes(i)));
}

function drawText() {                                           // below each, the likeliest to come
  const {ids} = model;
  const Y = logits();
  const five = i => order(rowAt(Y, i)).slice(0, 5).map(id =>
    node(id === ids[i + 1] ? "u" : "s", {}, visible(letters[id])));
  put(byId.tokens, ids.map((_, i) => character(i, "", five(i))));
}

function drawGuess() {                                          // what an autoencoder fills in
  const filled = chosen.pixels.slice();
  const Y = logits();
  for (const patch of chosen.mask)
    rowAt(Y, patch + 1).forEach((y, t) => {
      const k = t % 3;
      const pixel = pixelOf(patch, t / 3 | 0, side, P);
      filled[3 * pixel + k] = clamp(255 * (y * data.std[k] + data.mean[k]), 0, 255);
    });
  put(byId.verdict, `It fills in ${chosen.mask.length} masked patches`);
  put(byId.answer, patches(filled, "", () => 0));
}

function drawAnswer() {                                         // the likeliest classes or letters
  const {at} = chosen;
  const names = isText ? letters.map(visible) : data.classes;
  const chances = softmax(rowAt(logits(), isText ? at : 0));
  const best = order(chances).slice(0, 10);
  const asked = isText ? `After ${names[model.ids[at]]} comes` : "It sees:";
  put(byId.verdict, `${asked} ${names[best[0]]}, ${percent(chances[best[0]])}`);
  put(byId.answer, node("table", {}, best.map(k => node("tr", {}, node("th", {}, names[k]),
    node("td", {}, node("i", {style: `width: ${100 * chances[k]}%`})),
    node("td", {}, percent(chances[k]))))));
}

function drawHeads() {
  put(byId.heads, L.T.A.map((weights, k) => {
    const head = `${L.number}.${k + 1}`;
    const off = chosen.off.includes(head);
    const row = own(weights);
    return node("div", {}, view(row),
      button(`head ${k + 1}: ${off ? "off" : "on"}`, !off,
        () => set({off: toggled(chosen.off, head)})),
      off ? note("adds nothing") : "");
  }));
}

function drawCode() {                                           // before and after the step
  const before = own(L.T.X);
  const after = own(L.T.code);
  const m = after.length;
  const most = largest([...before, ...after].map(Math.abs));
  const strip = (values, kind) => {
    const rows = Math.min(...values) < 0 ? 2 : 1;               // above zero, and below
    const bars = [...values].map((y, j) => `M${j + .1} 0v${-y / most}h.8v${y / most}z`);
    return node("div", {innerHTML:
      `<svg viewBox="0 -1 ${m} ${rows}" height="${48 * rows}" preserveAspectRatio="none">
      <rect x="${chosen.entry}" y="-1" width="1" height="${rows}"/>
      <path class="${kind}" d="${bars.join("")}"/></svg>`});
  };
  const nonzeros = after.filter(y => y !== 0).length;
  put(byId.code, note("before the step"), strip(before, "before"),
    note(`after it: ${nonzeros} of ${m} entries are not zero`), strip(after, "after"));
  put(byId.largest, note("largest"), order(after).slice(0, 6).map(j =>
    button(`${j}: ${show(after[j])}`, j === chosen.entry, () => set({entry: j}))));
}

function drawEntry() {                                          // at every token
  byId.entry.textContent = `Entry ${chosen.entry} of layer ${L.number}`;
  put(byId.where, view(Float64Array.from({length: n}, (_, i) => rowAt(L.T.code, i)[chosen.entry])));
}
// ---- What the hand does
const toggled = (list, item) =>
  list.includes(item) ? list.filter(other => other !== item) : [...list, item];
const point = at => at === chosen.at || set({at, entry: null});
const toggleMask = () => isMae && chosen.at && set({mask: toggled(chosen.mask, chosen.at - 1)});
for (const knob of ["lambd", "eta"])
  byId[knob].oninput = () => set({[knob]: byId[knob].valueAsNumber});
byId.layer.oninput = () => set({layer: byId.layer.valueAsNumber, entry: null});
byId.untrained.onchange = () => set({kind: byId.untrained.checked ? "untrained" : "trained"});
byId.reset.onclick = () => set(start);
byId.code.onclick = e => e.target.closest("svg") &&
  set({entry: Math.floor(e.offsetX / byId.code.clientWidth * L.T.code.cols)});
byId.text.oninput = () => set({at: null, entry: null});
byId.class.onclick = () => point(0);
byId.picture.onclick = toggleMask;
byId.picture.onpointermove = byId.picture.onpointerdown = e => {
  const [x, y] = [e.offsetX, e.offsetY].map(offset =>
    clamp(offset / byId.picture.clientWidth * H | 0, 0, H - 1));
  point(1 + (y / P | 0) * side + (x / P | 0));
};
// ---- What stays: names, equations, the check; then what is shown first
const depth = models.trained.layers.length;
const worst = check(data, models.trained);
document.body.className = [data.task, c.rotary && "rotary", c.shift && "shift"].join(" ");
document.title = byId.title.textContent = `Look inside ${data.name}`;
byId.about.textContent =
  `A ${c.arch.toUpperCase()} with ${data.weights} weights in ${depth} layers.`;
byId.layer.max = depth;
byId.check.textContent =
  `On the first example this page is ${worst.toExponential(1)} from PyTorch.`;
byId.alarm.hidden = worst < 1e-3;
byId.text.value = data.text ?? "";
put(byId.thumbs, (data.labels ?? []).map((label, i) => {
  const pixels = pictureAt(bytes(data.pictures), i, H);
  const onclick = () => set({pixels, entry: null});
  return node("button", {ariaLabel: data.classes[label], onclick}, canvas(pixels));
}));
byId.thumbs.firstChild?.click();
set({});

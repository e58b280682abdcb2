// The page itself: what was chosen, what is computed, and how it is drawn. crate.js runs the model.
// ---- State: what was chosen, and is kept in the address
// `set` changes the state, as does a click on what has data-set; `update` computes and draws. `esc`
// keeps names and texts from being markup.
const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const {config: c, task} = data, text = task === "gpt", mae = task === "mae";
const P = c.patch_size, H = c.image_size, side = H / P;     // side: of the grid of patches
const middle = 1 + (side + 1) * (side >> 1);                // the token of the middle patch
const depth = c.layers + (c.decoder_layers ?? 0);
const kinds = ["trained", "untrained"];
const models = {};                      // kind -> the model, when it has been built
const letters = [...data.characters ?? "", "\ufffd"];       // the last stands for any other
const views = [];                       // what `put` draws on canvases
// masked patches are 3.7, heads that are off 2.1~2.4 (layer.head), a held entry is layer:entry:value
const initial = {picture: 0, mask: (data.masked ?? []).join("."), text: data.text, layer: c.layers,
  at: text ? -1 : mae || c.pool === "mean" ? middle : 0, entry: -1, hold: "", off: "",
  lambda: c.lambd, eta: c.eta, untrained: 0};               // -1: the last token, the largest entry
let state;                              // what was chosen
let pixels, file;                       // the picture, and its file's name
let turn = 0, edits = 0;                // counts of updates and of pictures
let painted;                            // whether this drag has painted
// What is drawn follows from the state: the model, its n tokens, the layer L and its trace T, the
// token `at` and the entry of its code
const shown = {};

const esc = words => String(words).replace(/[&<>"]/g, sign => `&#${sign.charCodeAt()};`);
const visible = letter => esc({" ": "␣", "\n": "↵"}[letter] ?? letter);
const digits = y => String(+y.toPrecision(3)).replace("-", "−");
const rgbOf = colour => colour.match(/\w\w/g).map(digits => parseInt(digits, 16));
const order = row => [...row.keys()].sort((a, b) => row[b] - row[a]);
const rowAt = (M, i = shown.at) => M.at.subarray(i * M.cols, (i + 1) * M.cols);
const clamp = (y, low, high) => Math.min(high, Math.max(low, y));
const masked = () => new Set(state.mask.split(".").filter(Boolean).map(Number));
const pause = ms => new Promise(done => setTimeout(done, ms));
const button = (inner, pressed, changes) =>
  `<button aria-pressed="${pressed}" data-set="${esc(JSON.stringify(changes))}">${inner}</button>`;

function set(changes) {
  Object.assign(state, changes);
  if (text || !("picture" in changes)) return update();
  state.picture = clamp(state.picture | 0, 0, data.labels.length - 1);
  const start = 3 * H * H * state.picture;
  return look(bytes(data.pictures).slice(start, start + 3 * H * H));
}

function look(picture, name) {                              // `name`: of the user's own file
  pixels = picture;
  file = name;
  edits++;
  return update();
}

// ---- Computing
// Runs a model on what is new since its last run; undefined if something newer has begun meanwhile
async function compute(kind, mine) {
  const model = models[kind] ??= build(data, kind), {eta, lambda, off, hold} = state;
  const all = [...state.text || "\n"], half = c.context >> 1, began = performance.now();
  const first = Math.max(0, Math.ceil((all.length - c.context) / half) * half);     // moves by half
  const ids = text ? idsOf(data, all.slice(first)) : [`${edits} ${state.mask}`];
  const knobs = {eta, lambda, off: off.split("~"), hold: hold.split(":").map(Number)};
  const key = JSON.stringify(knobs);
  let from = 0;
  while (key === model.key && from < ids.length && ids[from] === model.ids[from]) from++;
  if (from < ids.length) {
    const Z = text ? embedText(model, ids, from) : embedPicture(model, data, pixels, masked());
    model.key = null;
    for (const l of forward(model, Z, from, knobs))
      if (performance.now() - began > 60) {
        if (kind === kinds[+state.untrained]) put("verdict", `Thinking … layer ${l}`);
        await pause(0);
        if (mine !== turn) return;
      }
    const logits = read(model, rowsOf(model.layers.at(-1).T.out, from, from + Z.rows));
    model.logits = from ? stacked(model.logits, logits, from) : logits;
    put("speed", Math.round(performance.now() - began));
  }
  if (from < ids.length || ids.length < model.ids.length) model.numbers = null;
  return Object.assign(model, {key, ids, n: text ? ids.length : 1 + side ** 2});
}

async function update() {
  const mine = ++turn, current = await compute(kinds[+state.untrained], mine);
  if (current) draw(current, mine);
}

function draw(current, mine) {
  const focus = document.activeElement?.dataset.set, {n} = current;
  const L = current.layers[clamp(state.layer, 1, depth) - 1], {code} = L.T;
  const at = state.at < 0 || state.at >= n ? n - 1 : state.at;
  const entry = state.entry < 0 || state.entry >= code.cols ? order(rowAt(code, at))[0]
    : state.entry;
  Object.assign(shown, {model: current, n, L, T: L.T, at, entry});
  views.length = 0;
  (text ? drawText : drawPicture)();
  (mae ? drawGuess : drawAnswer)();
  drawHeads();
  drawStrips();
  drawEntry();
  for (const [id, value] of Object.entries({layer: L.number, lambda: state.lambda, eta: state.eta}))
    $(id).nextElementSibling.value = $(id).value = value;
  $("untrained").checked = +state.untrained;
  [...document.querySelectorAll("[data-set]")].find(box => box.dataset.set === focus)?.focus();
  settle(mine);
}

// ---- Drawing
function put(id, ...parts) {                               // and what is on its canvases
  $(id).innerHTML = parts.flat(2).join("");
  for (const box of $(id).querySelectorAll("[data-view]"))
    drawCanvas(box, ...views[box.dataset.view]);
}

// A value for each token: bars over the characters, colour over the picture. None: the picture
function view(values, picture = pixels, hidden) {
  if (text) return bars(values);
  views.push([values, picture, hidden]);                    // `put` draws it
  return `<div class="frame" data-view="${views.length - 1}"><canvas></canvas><i></i></div>`;
}

function bars(values) {
  const {model, at} = shown;
  const most = Math.max(1e-9, ...values), bar = i => 1.5 * Math.max(0, values[i]) / most;
  return `<div class="type">${model.ids.map((id, i) => `<span class="${i === at ? "at" : ""}">` +
    `<i style="height: ${bar(i)}em"></i>${visible(letters[id])}</span>`).join("")}</div>`;
}

function drawCanvas(box, values, picture, hidden = new Set()) {
  const [canvas, frame] = box.children, image = new ImageData(H, H), style = getComputedStyle(box);
  const {at} = shown;
  const [hot, page] = ["--accent", "--page"].map(name => rgbOf(style.getPropertyValue(name)));
  const most = Math.max(1e-9, ...values?.slice(1) ?? []);   // without the class token
  for (let i = 0; i < H * H; i++) {
    const y = i / H | 0, x = i % H, patch = (y / P | 0) * side + (x / P | 0);
    const rgb = picture.subarray(3 * i, 3 * i + 3), share = values?.[patch + 1] / most;
    const faint = page.map(part => .75 * part + .08 * sumOf(rgb));
    const hatch = (x + y) % 4 < 2 ? 150 : 90;
    image.data.set(hidden.has(patch) ? [hatch, hatch, hatch] : !values ? rgb :
      faint.map((part, k) => share * hot[k] + (1 - share) * part), 4 * i);
    image.data[4 * i + 3] = 255;
  }
  canvas.width = canvas.height = H;
  canvas.getContext("2d").putImageData(image, 0, 0);
  frame.style = `display: ${at ? "block" : "none"}; width: ${100 / side}%; height: ${100 / side}%;
    left: ${(at - 1) % side * 100 / side}%; top: ${((at - 1) / side | 0) * 100 / side}%`;
}

function drawPicture() {
  const {at} = shown;
  const all = bytes(data.pictures), row = 1 + ((at - 1) / side | 0), column = 1 + (at - 1) % side;
  put("picture", view(null, pixels, masked()));
  put("caption", esc(file ?? data.classes[data.labels[state.picture]]),
    at ? ` · row ${row}, column ${column}` : " · class token");
  put("thumbs", data.labels.map((_, i) => button(view(null, all.subarray(3 * H * H * i)),
    file === undefined && i === state.picture, {picture: i})));
}

function drawGuess() {                                      // what an autoencoder fills in
  const {logits} = shown.model, hidden = masked(), filled = pixels.slice(), size = 3 * P * P;
  for (const i of hidden)
    for (let t = 0; t < size; t++) {
      const k = t % 3, guess = logits.at[(i + 1) * size + t] * data.std[k] + data.mean[k];
      filled[3 * pixelOf(i, t / 3 | 0, side, P) + k] = clamp(255 * guess, 0, 255);
    }
  put("verdict", `It fills in ${hidden.size} masked patches`);
  put("answer", view(null, filled));
}

function drawText() {                                       // below each, the five likeliest next
  if ($("text").value !== state.text) $("text").value = state.text;
  const guess = (id, hit) => {
    const letter = visible(letters[id]);
    return hit ? `<u>${letter}</u>` : `<s>${letter}</s>`;
  };
  const {model, at} = shown, best = i => order(rowAt(model.logits, i)).slice(0, 5);
  put("tokens", model.ids.map((id, i) => [`<span class="${i === at ? "at" : ""}" `,
    `data-set='{"at": ${i}, "entry": -1}'><b>${visible(letters[id])}</b>`,
    ...best(i).map(id => guess(id, id === model.ids[i + 1])), "</span>"]));
}

function drawAnswer() {                                     // what the head reads after each layer
  const {model, L, at} = shown;
  if (!model.head && !text) return put("verdict", "An encoder without a head");
  const names = text ? letters.map(visible) : data.classes.map(esc);
  const rows = model.layers.map(({T: {out}}) =>
    softmax(read(model, text ? rowsOf(out, at, at + 1) : out).at.slice(0, names.length)));
  const best = order(rows.at(-1)).slice(0, 10), now = l => l === L.number - 1 ? "now" : "";
  const last = best.map(k => `${(100 * rows.at(-1)[k]).toFixed(1)} %`);
  const asked = text ? `After ${visible(letters[model.ids[at]])} comes` : "It sees:";
  put("verdict", `${asked} ${names[best[0]]}, ${last[0]}`);
  const bar = (share, l) => `<td class="${now(l)}"><i style="width: ${100 * share}%"></i>`;
  put("answer", "<table><tr><th>layer", rows.map((_, l) => `<th class="${now(l)}">${l + 1}`),
    "<th>", best.map((k, i) => [`<tr><td>${names[k]}`, ...rows.map((row, l) => bar(row[k], l)),
      `<td>${last[i]}`]), "</table>");
}

function drawHeads() {
  const {n, L, T, at} = shown, off = state.off.split("~").filter(Boolean);
  put("heads", T.A.map((rows, k) => {
    const name = `${L.number}.${k + 1}`, on = !off.includes(name), row = rows[at].subarray(0, n);
    const spread = Math.exp(-sumOf(row, share => share && share * Math.log(share))).toFixed();
    const flipped = (on ? [...off, name] : off.filter(other => other !== name)).join("~");
    const [a, b] = [0, L.heads].map(first => L.mix && Math.round(100 * L.mix[first + k]));
    const mixture = L.mix ? `; the previous token is ${a} % of the keys, ${b} % of the values` : "";
    return `<div>${view(row)}${button(`head ${k + 1}: ${on ? "on" : "off"}`, on, {off: flipped})}
      <small>${on ? `averages about ${spread} of ${n}` + mixture : "adds nothing"}</small></div>`;
  }));
}

function drawStrips() {                                     // the token before and after the step
  const {L, T, entry} = shown;
  const before = rowAt(T.X), code = rowAt(T.code), m = code.length, best = order(code).slice(0, 6);
  const most = Math.max(1e-9, ...before, ...code);
  const nonzeros = code.filter(y => y !== 0).length;
  const bars = values => [...values].map((y, i) => `M${i + .1} 0v${-y / most}h.8v${y / most}z`);
  const strip = (values, rows, kind) => `<svg viewBox="0 -1 ${m} ${rows}" height="${48 * rows}"
    preserveAspectRatio="none"><rect x="${entry}" y="-1" width="1" height="${rows}"/>
    <path class="${kind}" d="${bars(values).join("")}"/></svg>`;
  put("strips", "<small>before the step</small>", strip(before, 2, "bar"), `<small>after it:
    ${nonzeros} of ${m} entries are not zero</small>`, strip(code, L.decodes ? 2 : 1, "hot"));
  put("largest", "<small>largest</small>", best.map(j =>
    button(`${j}: ${digits(code[j])}`, j === entry, {entry: j})));
}

function drawEntry() {                                      // at every token, and where it is high
  const {n, L, T, entry} = shown, m = T.code.cols;
  const held = state.hold.startsWith(`${L.number}:${entry}:`);
  put("entry", `Entry ${entry} of layer ${L.number}${held ? ", held at every token" : ""}`);
  put("where", view(Float32Array.from({length: n}, (_, i) => T.code.at[i * m + entry])));
  $("hold").min = Math.floor(2 * T.code.at.reduce((least, y) => Math.min(least, y), 0));
  $("hold").max = Math.ceil(2 * T.code.at.reduce((most, y) => Math.max(most, y)));
  $("hold").value = rowAt(T.code)[entry];
  $("hold").nextElementSibling.value = digits(Number($("hold").value));
  const passages = data.entries?.[L.number - 1][entry] ?? [];
  const marked = (letter, hit) => hit ? `<mark>${visible(letter)}</mark>` : visible(letter);
  const title = passages.length ? "<small>It is highest here:</small>" : "";
  put("passages", title, passages.map(([words, i]) =>
    ["<p>", ...[...words].map((letter, j) => marked(letter, i === j)), "</p>"]));
}

// Once nothing has moved for a while: what was chosen goes into the address, then the charts follow
async function settle(mine) {
  await pause(100);
  if (mine !== turn) return;
  const kept = Object.entries(state).filter(([key, value]) => value !== initial[key]);
  history.replaceState(null, "", "#" + new URLSearchParams(kept));
  for (const kind of kinds) if (!await compute(kind, mine) || mine !== turn) return;
  drawCharts();
}

// R^c, its change and the nonzeros, layer by layer, of the trained and the untrained model
function drawCharts() {
  const {n, L} = shown;
  const both = kinds.map(kind => models[kind].numbers ??=
    models[kind].layers.map(L => numbers(L, n)));
  const charts = {rate: "R<sup>c</sup> of U<sub>k</sub>*LN(Z), each of norm 1, nats", change:
    "What attention adds to R<sup>c</sup>, nats", nonzeros: "Share of the code that is not zero"};
  const x = l => 44 + 240 * l / Math.max(1, depth - 1);
  put("charts", Object.entries(charts).map(([key, title]) => {
    const all = both.flat().map(row => row[key]).concat(key === "change" ? 0 : []);
    const low = Math.min(...all), high = Math.max(...all);
    const y = value => 112 - 100 * (value - low) / (high - low || 1);
    const points = rows => rows.map((row, l) => `${x(l)} ${y(row[key])}`);
    const dot = point => `<path class="dot" d="M${point}m-4 0a4 4 0 108 0a4 4 0 10-8 0"/>`;
    const curve = (rows, k) => `<g class="${kinds[k]}"><path d="M${points(rows).join("L")}"/>${
      points(rows).map(dot).join("")}</g>`;
    const [now, was] = both.map(rows => digits(rows[L.number - 1][key]));
    const rules = `M44 ${y(clamp(0, low, high))}H284M${x(L.number - 1)} 8V116`;
    const tick = (place, value) => `<text x="36" y="${place}">${digits(value)}</text>`;
    return `<div><small>${title}<br>layer ${L.number}: ● ${now}, untrained ○ ${was}</small>
      <svg viewBox="0 0 300 120"><path class="rule" d="${rules}"/>${tick(16, high)}${tick(116, low)}
      ${curve(both[1], 1)}${curve(both[0], 0)}</svg></div>`;
  }));
}

// ---- What the user does
function load() {                                           // what the address says
  state = {...initial};
  for (const [key, value] of new URLSearchParams(location.hash.slice(1)))
    if (key in initial) state[key] = typeof initial[key] === "number" ? Number(value) || 0 : value;
  set({picture: state.picture});
}
onclick = ({target}) =>
  target.closest("[data-set]") && set(JSON.parse(target.closest("[data-set]").dataset.set));
$("picture").onkeydown = $("tokens").onkeydown = e => {     // to another patch or character
  const row = text ? 0 : side;
  const steps = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row};
  if (!steps[e.key] || e.altKey || e.ctrlKey || e.metaKey) return;
  e.preventDefault();
  set({at: clamp(shown.at + steps[e.key], 0, shown.n - 1), entry: -1});
};
$("text").oninput = () => set({text: $("text").value, at: -1, entry: -1});
$("layer").oninput = () => set({layer: Number($("layer").value), entry: -1});
for (const id of ["lambda", "eta"]) $(id).oninput = () => set({[id]: Number($(id).value)});
$("untrained").onchange = () => set({untrained: +$("untrained").checked});
$("reset").onclick = () => set({...initial, text: state.text, picture: state.picture});
$("hold").oninput = () => {
  const {L, entry} = shown;
  set({hold: `${L.number}:${entry}:${$("hold").value}`, entry});
};
$("strips").onclick = e => e.target.closest("svg") &&
  set({entry: Math.floor(e.offsetX / $("strips").clientWidth * shown.T.code.cols)});
$("write").onclick = async () => {
  $("write").disabled = true;
  for (let i = 0; i < 20; i++) {
    const known = rowAt(shown.model.logits, shown.n - 1).slice(0, -1);      // the last is no text
    const chances = softmax(known, 1 / .8);                 // temperature 0.8
    let left = Math.random(), k = 0;
    while ((left -= chances[k]) > 0 && k < chances.length - 1) k++;
    await set({text: state.text + letters[k], at: -1});
    await pause(20);
  }
  $("write").disabled = false;
};
$("file").onchange = async () => {
  const [chosen] = $("file").files, brush = new OffscreenCanvas(H, H).getContext("2d");
  try {
    const image = await createImageBitmap(chosen), size = Math.min(image.width, image.height);
    brush.imageSmoothingQuality = "high";
    brush.fillStyle = "white";                              // behind what is transparent
    brush.fillRect(0, 0, H, H);
    const [x, y] = [image.width - size, image.height - size];
    brush.drawImage(image, x / 2, y / 2, size, size, 0, 0, H, H);
    look(brush.getImageData(0, 0, H, H).data.filter((_, i) => i % 4 < 3), chosen.name);
  } catch { put("caption", esc(chosen.name), " cannot be read as a picture"); }
};

function pointed(e) {                                       // the pixel there, and its patch
  const {left, top, width} = $("picture").getBoundingClientRect();
  const pixel = offset => clamp(offset / width * H | 0, 0, H - 1);
  const x = pixel(e.clientX - left), y = pixel(e.clientY - top);
  return {x, y, patch: (y / P | 0) * side + (x / P | 0)};
}

function paint(x, y) {                                      // a round dab of the chosen colour
  const rgb = rgbOf($("colour").value);
  for (let i = 0; i < H * H; i++)
    if (Math.hypot(i % H - x, (i / H | 0) - y) < H / 20) pixels.set(rgb, 3 * i);
  painted = true;
  edits++;
}

function choose(patch) {
  if (painted || shown.at !== patch + 1) set({at: patch + 1, entry: -1});
}

$("picture").onpointerdown = e => {
  painted = false;
  choose(pointed(e).patch);
};
$("picture").onpointermove = e => {
  const {x, y, patch} = pointed(e);
  // a drag paints; where a click masks, only once it has left its patch
  if (e.buttons && (!mae || painted || shown.at !== patch + 1)) paint(x, y);
  choose(patch);
};
$("picture").onpointerup = e => {
  const {patch} = pointed(e), patches = masked();
  if (mae && !painted)                                      // a click masks
    set({mask: (patches.delete(patch) ? [...patches] : [...patches, patch]).join(".")});
  else choose(patch);
  painted = false;
};

// ---- What stays: names, each equation with its source and its place, the check
function equation(id, words, source, part) {                // _k, ^* and _{...} as in the papers
  words = words.replace(/_(\{.*?\}|.)/g, "<sub>$1</sub>").replace(/\^(\{.*?\}|.)/g, "<sup>$1</sup>")
    .replace(/[{}]/g, "").replace(/,/g, ", &ensp;").replace(/ReLU|softmax|logdet|LN/g, "<b>$&</b>");
  put(id, words, ` <small>${source}, ${part} in model.py</small>`);
}
const back = {learned: "+ W", subspace: "+ s[U_1…U_K]", negative: "− s[U_1…U_K]",
  transpose: "+ s[U_1…U_K]^*"}[data.output];
equation("compress", `Z^{l+½} = Z^l ${back} [w_k softmax(w_k^*w_k / √p)]_k, w_k = U_k^*LN(Z^l)`,
  (back === "+ W" ? "[J] Eq. (37)" : "[S], [J] Eq. (36)") + (c.rotary ? "; rotary positions" : "")
  + (c.shift ? "; keys and values mixed with the previous token" : ""), "MSSA");
equation("sparsify", ...c.arch === "crate-alpha" ?
  [`Z^{l+1} = Z^{l+½} + D̂A_{${c.ista_steps}}, A_0 = 0,
    A_s = ReLU(A_{s−1} − ηD^*(DA_{s−1} − X) − ηλ), X = LN(Z^{l+½})`,
  "[B] Eq. (7.5.3)-(7.5.5)", "ODL"] :
  ["Z^{l+1} = ReLU(X − ηD^*(DX − X) − ηλ), X = LN(Z^{l+½})", "[J] Eq. (44)", "ISTA"]);
equation("decode", "Decoder: Y = D̃ LN(Z), Z′ = Y − MSSA(LN(Y))", "[B] Eq. (7.6.3)-(7.6.4)",
  "DecoderLayer");
equation("rate", "R^c(Z | U) = ½ Σ_k logdet(I + p/(nε^2) (U_k^*Z)^*U_k^*Z), ε = 0.1",
  "[J] Eq. (13)", "subspace_coding_rate");
document.body.className = task;
document.title = document.querySelector("h1").textContent = `Look inside ${data.name}`;
$("layer").max = depth;
put("about", `A ${c.arch.toUpperCase()} with ${data.weights} weights in ${depth} layers.`);
const worst = check(data, models.trained = build(data, "trained"));
put("check", `On the first example this page is at most ${worst.toExponential(1)} from PyTorch.`);
$("alarm").hidden = worst < 1e-3;
onhashchange = load;
load();

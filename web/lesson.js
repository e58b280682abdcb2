// The lesson: what each step computes and draws, its questions, and the comparison with PyTorch.
// crate.js computes. Inputs of one name agree; `knobs` has their values.
"use strict";
const $ = (words, within = document) => within.querySelector(words);
const $$ = (words, within = document) => [...within.querySelectorAll(words)];
const data = JSON.parse($("#data").textContent), {config: c, classes} = data;
const H = c.image_size, side = H / c.patch_size;
const models = ["trained", "untrained"].map(kind => build(data, kind));
const [shelf, many] = [data.pictures, data.many].map(bytes);
const pictureAt = (i, from = shelf) => from.slice(3 * H * H * i, 3 * H * H * (i + 1));
const [cloud, near, lines, head] = Object.values(data.points).map(matrixOf);
const plane = matrixOf([[1, 0], [0, 1]]);                   // U of a head that is all of R^2
const knobs = {};
let pixels, known;                                          // the picture in sight, and its traces
let turn = 0, held, worst;

const percent = y => `${Math.round(100 * y)} %`;

// ---- The trained model, with switches
function averaged(L, w, kind, root = 1) {                   // heads side by side
  const s = root ? 1 : L.p ** .25;                          // s^2 undoes the division by sqrt(p)
  if (kind === "softmax") return times(1 / s, attention(L, times(s, w), c, []).ssa);
  if (kind === "each token alone") return w;
  const mean = multiply(made(1, w.rows, () => 1 / w.rows), transposed(w)).at;
  return made(w.rows, w.cols, t => mean[t % w.cols]);
}
const lifted = (L, Z, heads, out) => out === "W" ? plus(Z, multiply(heads, L.W, L.bias)) :
  plus(Z, multiply(heads, transposed(L.U)), out === "U" ? 1 : -1);
function sparse(L, X, {prox = "ReLU", noD, eta = c.eta, lambd: lambda = c.lambd}) {
  const by = {D: L.D, Dt: times(noD ? 0 : 1, L.Dt)}, positive = step(X, X, by, {eta, lambda});
  const minus = times(-1, X);                               // soft threshold: both signs
  return prox === "ReLU" ? positive : plus(positive, step(minus, minus, by, {eta, lambda}), -1);
}
function run(model, picture, {att = "softmax", out = "W", root = 1, noLN, ...rest} = {}) {
  let Z = embedPicture(model, data, picture, new Set());
  return model.layers.map(L => {
    const w = multiply(noLN ? Z : normalize(Z, L.norm1), L.U);
    const half = lifted(L, Z, averaged(L, w, att, root), out);
    const X = noLN ? half : normalize(half, L.norm2), before = Z;
    Z = sparse(L, X, rest);
    return {L, Z: before, w, half, X, code: Z};
  });
}
function chancesOf(model, picture, switches) {
  const {code} = run(model, picture, switches).at(-1);
  return [...softmax(read(model, code).at.slice(0, c.classes))];
}
const model = () => models[+knobs.untrained];
const traces = () => known[+knobs.untrained] ??= run(model(), pixels);
const trace = () => traces()[knobs.layer - 1];

// ---- Drawing
const hot = [217, 94, 30], dark = [128, 128, 136];          // as --accent, --soft, light or dark
const dot = ([x, y], r, more = "") => `<circle cx="${x}" cy="${y}" r="${r}" ${more}/>`;
const line = (points, kind = "") => `<path class="${kind}" d="M${points.join("L")}"/>`;
const arrow = ([x, y], [u, v], kind) => line([[x, y], [x + u, y + v]], kind);
const table = rows => `<table>${rows.map(row => `<tr><th>${row.join("<td>")}`).join("")}</table>`;
function bars(box, rows, high = 0) {                        // [name, value, kind, words]
  const values = rows.map(row => row[1]), low = Math.min(0, ...values);
  const share = y => 100 * y / (Math.max(high, ...values) - low || 1);
  $(".bars", box).innerHTML = table(rows.map(([name, y, kind = "", words = show(y)]) => [name,
    `<i class="${kind}" style="left: ${share(Math.min(0, y) - low)}%;
    width: ${share(Math.abs(y))}%"></i>`, words]));
}
const heat = (canvas, M, most) => paintCanvas(canvas, M.cols, M.rows, t =>
  [...M.at[t] < 0 ? dark : hot, 255 * Math.abs(M.at[t]) / most]);
function axesOf(Z) {                                        // of Z Z^*, for tokens in the plane
  const G = multiply(transposed(Z), transposed(Z)).at, apart = Math.hypot((G[0] - G[3]) / 2, G[1]);
  return {large: (G[0] + G[3]) / 2 + apart, small: Math.max(0, (G[0] + G[3]) / 2 - apart),
    angle: Math.atan2(2 * G[1], G[0] - G[3]) / 2};
}
const inSpace = ([x, y, z]) => [.95 * y - .5 * x, .4 * x + .12 * y - z];
function drawSpace(box, Z, U) {                             // tokens and two lines
  const axes = [[2, 0, 0], [0, 2, 0], [0, 0, 1.6]].map(end =>
    line([[0, 0], inSpace(end)], "faint"));
  const along = (u, s) => inSpace(u.map(y => s * y));
  $("svg", box).innerHTML = axes.concat(
    U.map(u => line([along(u, -1.9), along(u, 1.9)], "hot")),
    rowsIn(Z).map(z => dot(inSpace(z), .06)), U.map((u, k) => {
      const [x, y] = along(u, -2.2);
      return `<text x="${x}" y="${y}">U${"₁₂"[k]}</text>`;
    })).join("");
}

// ---- The steps: each draws its section and returns the numbers that it shows
function room(box) {
  const {eps1: eps, far1: far, shift1: shift} = knobs, blur = eps ** 2 / 2;
  const Z = made(12, 2, t => far * cloud.at[t] + (t % 2 ? 0 : shift));
  const {large, small, angle} = axesOf(Z), R = codingRate(Z, eps);
  const [a, b] = [large, small].map(y => Math.sqrt(y / Z.rows + blur));
  $("svg", box).innerHTML = line([[-3.2, 0], [3.2, 0]], "faint") +
    line([[0, -2.6], [0, 2.6]], "faint") + dot([0, 0], Math.sqrt(blur), 'class="ball"') +
    `<ellipse rx="${a}" ry="${b}" transform="rotate(${angle * 180 / Math.PI})"/>` +
    rowsIn(Z).map((z, i) => dot(z, .08, `data-i="${i}"`)).join("");
  $(".read", box).innerHTML =
    `<b>R = ${show(R)}</b>: the ellipse has the area of ${show(Math.exp(R))} balls.`;
  return {R};
}
function subspaces(box) {
  const [a, b] = [knobs.turn2, knobs.tilt2].map(y => y * Math.PI / 180);
  const [ca, cb] = [Math.cos(a), Math.cos(b)];
  const U = [[ca * cb, Math.sin(a) * cb, Math.sin(b)], [-Math.sin(a), ca, 0]], frame = matrixOf(U);
  const Rc = subspaceRate(near, frame, 1, .5);
  const missed = 1 - (sizeOf(multiply(near, frame)) / sizeOf(near)) ** 2;
  drawSpace(box, near, U);
  bars(box, [["R<sup>c</sup>", Rc / 2, "hot", show(Rc)],
    ["energy missed", missed, "", percent(missed)]], 1);
  return {Rc, missed};
}
function objective(box) {
  const angle = knobs.turn3 * Math.PI / 180, [cos, sin] = [Math.cos(angle), Math.sin(angle)];
  const turned = ([x, y, z]) => [x * cos - y * sin, x * sin + y * cos, z]
    .map(v => Math.abs(v) < 1e-9 ? 0 : v);
  const U = [[1, 0, 0], [0, 1, 0]].map(turned), Z = matrixOf(rowsIn(lines).map(turned));
  const R = codingRate(Z, .5), Rc = subspaceRate(Z, matrixOf(U), 1, .5);
  const cost = knobs.lambda3 * nonzeros(Z);
  drawSpace(box, Z, U);
  bars(box, [["R", R], ["− R<sup>c</sup>", -Rc],
    ["− λ‖Z‖₀", -cost, "", `${show(-cost)} <small>= −λ × ${nonzeros(Z)}</small>`],
    ["objective", R - Rc - cost, "hot"]], 3.6);
  return {objective: R - Rc - cost};
}
function gradient(box) {
  const eps = .5, paths = [head], beta = 2 / (24 * eps ** 2);
  const slope = Z => times(1 / beta, subspaceRateGrad(Z, plane, 2, eps));
  for (let s = 0; s < knobs.steps4; s++) paths.push(plus(paths[s], slope(paths[s]), -.1));
  const Z = paths.at(-1), G = rowsIn(times(-1, slope(Z))), [was, is] = [head, Z].map(axesOf);
  const [strong, weak] = ["large", "small"].map(key => percent(Math.sqrt(is[key] / was[key])));
  const cost = subspaceRate(Z, plane, 2, eps);
  $("svg", box).innerHTML = G.map((_, i) =>
    line(paths.map(M => [M.at[2 * i], M.at[2 * i + 1]]), "faint")).join("") +
    rowsIn(Z).map((z, i) => arrow(z, G[i], "hot") + dot(z, .05)).join("");
  $(".read", box).innerHTML = `<b>R<sup>c</sup> = ${show(cost)}</b>. The strong direction has
    ${strong} of its length left, the weak one ${weak}.`;
  return {cost};
}
function withoutInverse(box) {
  const {eps5: eps, length5: length} = knobs, beta = 2 / (24 * eps ** 2);
  const Z = times(length, head), {large, small} = axesOf(Z);
  const [exact, two] = [false, true].map(terms => subspaceRateGrad(Z, plane, 2, eps, terms));
  const shortened = v => v.map(y => y * Math.min(.6, 1.2 / Math.hypot(...v)));
  const [one, other] = [exact, two].map(M => rowsIn(times(-1 / beta / length, M)).map(shortened));
  $("svg", box).innerHTML = rowsIn(head).map((z, i) => arrow(z, one[i], "dark") +
    arrow(z, other[i], "hot") + dot(z, .05)).join("");
  const row = (name, s) => [name, show(s), show(1 / (1 + s)), `<b class="hot">${show(1 - s)}</b>`];
  $(".read", box).innerHTML = table([["direction", "s", "exact: 1/(1 + s)", "two terms: 1 − s"],
    row("strong", beta * large), row("weak", beta * small)]);
  return {exact: sizeOf(exact), two: sizeOf(two)};
}
function softmaxForGram(box) {
  const {token, root} = knobs, {L: {p}, w} = trace(), n = w.rows, first = (knobs.head - 1) * p;
  const own = made(n, p, t => w.at[(t / p | 0) * w.cols + first + t % p]), G = multiply(own, own);
  const rowOf = M => M.at.subarray(token * n, token * n + n), scale = root ? p ** -.5 : 1;
  const A = matrixOf(rowsIn(G).map(row => softmax(row, scale)));
  const most = Math.max(...rowOf(A));
  const [left, middle, right] = $$("figure canvas", box);
  heat(left, G, Math.max(...flat(G)) / 2);
  heat(middle, A, .2);
  paintCanvas(right, side, side, t => t + 1 === token ? [...dark, 255] :
    [...hot, 255 * rowOf(A)[t + 1] / most]);
  const row = (name, M, s) => [name, Math.min(...flat(M)) * s, Math.max(...flat(M)) * s,
    sumOf(rowOf(M)) * s].map(y => y === name ? y : show(y));
  $(".read", box).innerHTML = table([["", "least", "most", "sum of the token’s row"],
    row("similarities", G, scale), row("their softmax", A, 1)]);
  return {most};
}
function leftOut(box) {
  const {L, Z, w, half} = trace(), U = unit(L.U), rateOf = M => subspaceRate(M, U, L.p, .1);
  const stepOf = kind => plus(lifted(L, Z, averaged(L, w, kind), "W"), Z, -1);
  const attended = plus(half, Z, -1), slope = subspaceRateGrad(Z, U, L.p, .1), before = rateOf(Z);
  const changes = [attended, stepOf("each token alone"), stepOf("mean token"), times(-1, slope),
    times(-1, Z)].map(step => {                             // all as long as attention's
    const moved = plus(Z, atNorm(step, attended));
    return rateOf(knobs.equal7 ? atNorm(moved, Z) : moved) - before;
  });
  bars(box, ["attention", "each token alone", "mean token", "− ∇R<sup>c</sup>", "− Z"]
    .map((name, k) => [name, changes[k], k ? "" : "hot"]));
  return {attention: changes[0], alone: changes[1]};
}
function dictionary(box) {
  const {L, X, code} = trace(), DA = multiply(code, L.D);
  const miss = 100 * sizeOf(plus(X, DA, -1)) / sizeOf(X);
  heat($("figure canvas", box), multiply(L.Dt, L.Dt), 1);
  bars(box, [["R(X)", X], ["R(DA)", DA], ["R(A)", code]].map(([name, M], k) =>
    [name, codingRate(M, .5), k ? "hot" : ""]));
  $(".read", box).innerHTML = `‖X − DA‖ is <b>${Math.round(miss)} %</b> of ‖X‖.`;
  return {miss};
}
function shrinking(box) {
  const {L, X} = trace(), {token, lambd, eta, noD} = knobs, A = sparse(L, X, knobs);
  const relu = made(X.rows, X.cols, t => Math.max(0, X.at[t])), D = times(noD ? 0 : 1, L.D);
  const costs = [A, relu, times(0, X)].map(M => lasso(X, M, D, lambd));
  const y = v => 55 - 50 * Math.max(-1, Math.min(1, v / 3)), threshold = eta * lambd;
  const stick = (v, i, wide, kind) => `<rect class="${kind}" x="${5 * i + (5 - wide) / 2}"
    y="${Math.min(y(v), 55)}" width="${wide}" height="${Math.abs(y(v) - 55)}"/>`;
  $("svg", box).innerHTML = rowsIn(X)[token].map((v, i) => stick(v, i, 4)).join("") +
    rowsIn(A)[token].map((v, i) => stick(v, i, 2, "hot")).join("") +
    [threshold, -threshold].map(v => line([[0, y(v)], [320, y(v)]], "dark")).join("");
  $(".read", box).innerHTML = `Grey: a token of X. Colour: its code. Lines: ± ηλ.
    <b>${percent(nonzeros(A) / flat(A).length)}</b> of the entries of all codes are not 0.`;
  bars(box, ["the step’s code", "ReLU(X)", "no code"].map((name, k) =>
    [name, costs[k], k ? "" : "hot"]));
  return {lasso: 100 * costs[0] / costs[2]};
}
function wholeLayer(box) {
  const {L, Z, half, code} = trace(), U = unit(L.U), names = ["R − R<sup>c</sup>", "− λ‖Z‖₀"];
  const [before, middle, after] = [Z, half, code].map(M =>
    [codingRate(M, .1) - subspaceRate(M, U, L.p, .1), -knobs.lambda11 * nonzeros(M)]);
  const rows = names.flatMap((name, k) => [[`attention: ${name}`, middle[k] - before[k]],
    [`ISTA: ${name}`, after[k] - middle[k]]]);
  bars(box, [...rows, ["the layer", sumOf(after) - sumOf(before), "hot"]]);
  return {rise: after[0] - before[0]};
}
function classify(box, switches, model) {
  const chances = chancesOf(model, pixels, switches), order = [...chances.keys()];
  const best = order.sort((i, j) => chances[j] - chances[i]).slice(0, 4);
  bars(box, best.map((k, i) => [classes[k], chances[k], i ? "" : "hot", percent(chances[k])]), 1);
  score(box, model, {...switches}, box.turn = ++turn);
  return {chance: chances[0]};
}
async function score(box, model, switches, mine) {          // of forty; the page stays alive
  for (let i = 0, right = 0; i < 40; i++) {
    await new Promise(done => setTimeout(done));
    if (box.turn !== mine) return;
    const chances = chancesOf(model, pictureAt(i, many), switches);
    right += chances.indexOf(Math.max(...chances)) === data.many_labels[i];
    $(".score", box).innerHTML = `<b>${right} of ${i + 1}</b> drawn pictures right`;
  }
}
const steps = [() => ({}), room, subspaces, objective, gradient, withoutInverse, softmaxForGram,
  leftOut, box => classify(box, {out: knobs.out}, models[0]), dictionary, shrinking, wholeLayer,
  box => classify(box, knobs, model())];

// ---- What changes, and what is drawn again
const dirty = new Set();                                    // steps to draw once they are in sight
function drawNow(n) {
  const box = $(`#s${n}`);
  dirty.delete(n);
  for (const canvas of $$(".sight", box))
    paintCanvas(canvas, H, H, t => [...pixels.subarray(3 * t, 3 * t + 3), 255]);
  return steps[n](box);
}
function draw(numbers) {
  const inSight = n => {
    const {top, bottom} = $(`#s${n}`).getBoundingClientRect();
    return bottom > -200 && top < innerHeight + 200;
  };
  numbers.forEach(n => dirty.add(n));
  [...dirty].filter(inSight).forEach(drawNow);
}
function assign(changes) {                                  // returns the steps that they change
  const names = Object.keys(changes).map(name => `[name="${name}"]`).join();
  Object.assign(knobs, changes);
  for (const input of $$(names)) {
    input[input.type === "checkbox" ? "checked" : "value"] = knobs[input.name];
    if (input.type === "range") input.nextElementSibling.value = show(knobs[input.name]);
  }
  if ("picture" in changes) look(pictureAt(knobs.picture - 1));
  return [...steps.keys()].filter(n => $(names, $(`#s${n}`)));
}
function look(picture) {
  pixels = picture;
  known = [];
}
const set = changes => draw(assign(changes));
const valueOf = input => input.type === "checkbox" ? +input.checked :
  input.type === "range" ? +input.value : input.value;

$$("[type=range]").forEach(input => input.after(document.createElement("output")));
$$(".choose").forEach(box => box.innerHTML = $(".choose").innerHTML);
for (const box of $$("[data-again]"))                       // inputs that other steps have, too
  for (const name of box.dataset.again.split(" "))
    box.append($(`[name=${name}]`).parentElement.cloneNode(true));
for (const svg of $$("[data-changes]")) {                   // step 7's figure, [kind][layer]
  const kinds = JSON.parse(svg.dataset.changes).map((row, k) => row.map((y, l) =>
    dot([26 + 110 / (row.length - 1) * l, -y], 3.5, `class="kind${k}"`)));
  const ticks = [0, -50, -100, -150].map(y =>
    line([[18, -y], [144, -y]], "faint") + `<text x="14" y="${3 - y}">${show(y)}</text>`);
  svg.innerHTML = [...ticks, ...kinds.flat()].join("");
}
const initial = Object.fromEntries($$(".live [name]").map(input => [input.name, valueOf(input)]));
const switches = Object.fromEntries(["att", "out", "prox", "root", "noD", "noLN", "eta", "lambd"]
  .map(name => [name, initial[name]]));
oninput = ({target}) => target.name && set({[target.name]: valueOf(target)});
onscroll = onresize = () => draw([]);
onbeforeprint = () => [...dirty].forEach(drawNow);
$(".reset").onclick = () => set(initial);
$$(".ask button").forEach(button => button.onclick = () => {
  const box = button.closest(".ask");
  $$("button", box).forEach(other => other.ariaPressed = other === button);
  box.classList.add("answered");
  if (box.dataset.set) set({...switches, ...JSON.parse(box.dataset.set)});
});
$$(".sight").forEach(canvas => canvas.onpointerdown = canvas.onpointermove = e => {     // a brush
  if (!e.buttons) return;
  const [x, y] = [e.offsetX, e.offsetY].map(offset => offset / canvas.clientWidth * H);
  look(painted(pixels, x, y, knobs.colour));
  draw([...steps.keys()]);
});
$("#s1 svg").onpointerdown = ({target}) => held = target.dataset.i;
$("#s1 svg").onpointermove = ({buttons, movementX, movementY}) => {
  if (!buttons || !held) return;
  const scale = 6.4 / $("#s1 svg").clientWidth / knobs.far1;
  cloud.at[2 * held] += scale * movementX;
  cloud.at[2 * held + 1] += scale * movementY;
  drawNow(1);
};

// ---- The comparison with PyTorch; with #test also every end of every knob
function* faults() {
  assign({picture: 1});
  const shown = Object.assign({}, ...[...steps.keys()].map(drawNow));
  for (const [key, y] of Object.entries(data.known)) {
    const off = Math.abs(shown[key] - y) / Math.max(1, Math.abs(y));
    worst = Math.max(worst, off);
    if (!(off < 1e-3)) yield `${key} is ${shown[key]}, not ${y}`;
  }
}
function* stuck() {                                         // inputs with which a number is none
  for (const name in initial) {
    const {type, min, max, options} = $(`.live [name="${name}"]`);
    const all = type === "range" ? [+min, +max] : [...options ?? [1]].map(o => o.value ?? o);
    for (const value of [...all, initial[name]])
      for (const n of assign({[name]: value}))
        if (!Object.values(drawNow(n)).every(Number.isFinite)) yield `step ${n}, ${name} ${value}`;
  }
  $$("[data-right]").forEach(button => button.click());
}
assign(initial);
worst = check(data, models[0]);
const testing = location.hash === "#test", [fault] = [...faults(), ...testing ? stuck() : []];
$("#alarm").hidden = !fault && worst < 1e-3;
const verdict = fault ? `FAIL: ${fault}. ` : "PASS. ";
$("#agree").textContent = (testing ? verdict : "") +
  `PyTorch computed numbers of this page, too: they are at most ${worst.toExponential(1)} apart.`;
set(initial);

// The lesson: what each step draws, in order, what the hand does, the comparison with PyTorch.
// crate.js runs the model, rates.js has the objective.
"use strict";
// ---- State -------------------------------------------------------------------------------------
const $ = (words, within = document) => within.querySelector(words);
const $$ = (words, within = document) => [...within.querySelectorAll(words)];
const data = JSON.parse($("#data").textContent);
const c = data.config;
const H = c.image_size;
const models = [build(data, "trained"), build(data, "untrained")];
const [shelf, many] = [bytes(data.pictures), bytes(data.many)];
const [cloud, near, lines, head] = Object.values(data.points).map(matrixOf);
const plane = matrixOf([[1, 0], [0, 1]]);           // U of a head that is all of R^2
const asTrained = {att: "softmax", out: "W", prox: "ReLU", root: 1, noD: 0, noLN: 0,
  eta: c.eta, lambd: c.lambd};
const knobs = {};                                   // the value of each input, by its name
let pixels;                                         // of the picture in sight
let runs;                                           // what each model makes of it
function look(picture) {
  pixels = picture;
  runs = [];
}
const model = () => models[+knobs.untrained];
const traces = () => runs[+knobs.untrained] ??= run(model(), pixels, asTrained);
const trace = () => traces()[knobs.layer - 1];
// ---- The model, with switches ------------------------------------------------------------------
function averaged(L, w, {att, root}) {              // heads side by side
  if (att === "each token alone") return w;
  if (att === "mean token") return linear(made(w.rows, w.rows, () => 1 / w.rows), transposed(w));
  const s = root ? 1 : L.p ** .25;                  // s^2 undoes the division by sqrt(p)
  return times(1 / s, attention(L, times(s, w), c, []).ssa);
}
function lifted(L, Z, heads, out) {
  if (out === "W") return plus(Z, linear(heads, L.W, L.bias));
  return plus(Z, linear(heads, transposed(L.U)), out === "U" ? 1 : -1);
}
function sparse(L, X, switches) {
  const by = switches.noD ? {D: L.D, Dt: times(0, L.Dt)} : L;
  const positive = ista(X, by, switches);
  if (switches.prox === "ReLU") return positive;
  const minus = times(-1, X);                       // soft threshold: both signs
  return plus(positive, ista(minus, by, switches), -1);
}
function run(model, picture, switches) {
  let code = embedPicture(model, data, picture, new Set());
  return model.layers.map(L => {
    const Z = code;
    const w = linear(switches.noLN ? Z : normalize(Z, L.norm1), L.U);
    const half = lifted(L, Z, averaged(L, w, switches), switches.out);
    const X = switches.noLN ? half : normalize(half, L.norm2);
    code = sparse(L, X, switches);
    return {L, Z, w, half, X, code};
  });
}
const chancesOf = (model, picture, switches) =>
  softmax(flat(read(model, run(model, picture, switches).at(-1).code)));
// ---- Drawing -----------------------------------------------------------------------------------
const [hot, dark] = [[217, 94, 30], [128, 128, 136]];   // as --accent and --soft, light or dark
const degrees = Math.PI / 180;
const percent = y => `${Math.round(100 * y)} %`;
const fill = (box, part, ...marks) => $(part, box).innerHTML = marks.flat().join("");
const dot = ([x, y], r, more = "") => `<circle cx="${x}" cy="${y}" r="${r}" ${more}/>`;
const line = (points, kind = "") => `<path class="${kind}" d="M${points.join("L")}"/>`;
const text = ([x, y], words) => `<text x="${x}" y="${y}">${words}</text>`;
const arrow = ([x, y], [u, v], kind) => line([[x, y], [x + u, y + v]], kind);
const table = rows => `<table>${rows.map(row => `<tr><th>${row.join("<td>")}`).join("")}</table>`;
const heat = (canvas, M, most) => paintCanvas(canvas, M.cols, M.rows, t =>
  [...M.at[t] < 0 ? dark : hot, 255 * Math.abs(M.at[t]) / most]);

function bars(box, rows, high = 0) {                // [name, value, kind, words]
  const values = rows.map(row => row[1]);
  const low = Math.min(0, ...values);
  const share = y => 100 * y / (Math.max(high, ...values) - low || 1);
  fill(box, ".bars", table(rows.map(([name, y, kind = "", words = show(y)]) => [name,
    `<i class="${kind}" style="left: ${share(Math.min(0, y) - low)}%;
    width: ${share(Math.abs(y))}%"></i>`, words])));
}
const firstHot = values => Object.entries(values).map(([name, y], k) => [name, y, k ? "" : "hot"]);

function axesOf(Z) {                                // of Z Z^*, for tokens in the plane
  const [xx, xy, , yy] = gram(Z).at;
  const mean = (xx + yy) / 2;
  const apart = Math.hypot((xx - yy) / 2, xy);
  const angle = Math.atan2(2 * xy, xx - yy) / 2;
  return {large: mean + apart, small: Math.max(0, mean - apart), angle};
}

const inSpace = ([x, y, z]) => [.95 * y - .5 * x, .4 * x + .12 * y - z];
function drawSpace(box, Z, U) {                     // tokens and two lines
  const along = (u, s) => inSpace(u.map(y => s * y));
  fill(box, "svg",
    [[2, 0, 0], [0, 2, 0], [0, 0, 1.6]].map(end => line([[0, 0], inSpace(end)], "faint")),
    rowsIn(U).map(u => line([along(u, -1.9), along(u, 1.9)], "hot")),
    rowsIn(Z).map(z => dot(inSpace(z), .06)),
    rowsIn(U).map((u, k) => text(along(u, -2.2), `U${"₁₂"[k]}`)));
}

// Each step draws its section, `box`, and returns numbers that it shows
// ---- 1: the ellipse of the tokens, and the ball of the error
function room(box) {
  const {eps1: eps, far1: far, shift1: shift} = knobs;
  const Z = made(12, 2, t => far * cloud.at[t] + (t % 2 ? 0 : shift));
  const R = codingRate(Z, eps);
  const blur = eps ** 2 / 2;
  const {large, small, angle} = axesOf(Z);
  const [a, b] = [large, small].map(y => Math.sqrt(y / Z.rows + blur));
  fill(box, "svg",
    line([[-3.2, 0], [3.2, 0]], "faint"), line([[0, -2.6], [0, 2.6]], "faint"),
    dot([0, 0], Math.sqrt(blur), 'class="ball"'),
    `<ellipse rx="${a}" ry="${b}" transform="rotate(${angle / degrees})"/>`,
    rowsIn(Z).map((z, i) => dot(z, .08, `data-i="${i}"`)));
  fill(box, ".read",
    `<b>R = ${show(R)}</b>: the ellipse has the area of ${show(Math.exp(R))} balls.`);
  return {R};
}
// ---- 2: R^c of two lines that turn
function subspaces(box) {
  const [turn, tilt] = [knobs.turn2 * degrees, knobs.tilt2 * degrees];
  const U = matrixOf([
    [Math.cos(turn) * Math.cos(tilt), Math.sin(turn) * Math.cos(tilt), Math.sin(tilt)],
    [-Math.sin(turn), Math.cos(turn), 0]]);
  const Rc = subspaceRate(near, U, 1, .5);
  const missed = 1 - (sizeOf(linear(near, U)) / sizeOf(near)) ** 2;
  drawSpace(box, near, U);
  bars(box, [["R<sup>c</sup>", Rc / 2, "hot", show(Rc)],
    ["energy missed", missed, "", percent(missed)]], 1);
  return {Rc, missed};
}
// ---- 3: the objective of tokens and subspaces that turn together
function objective(box) {
  const angle = knobs.turn3 * degrees;
  const [cos, sin] = [Math.cos(angle), Math.sin(angle)].map(y => +y.toFixed(9));  // 0 at 90°
  const Z = linear(lines, matrixOf([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]]));
  const U = matrixOf([[cos, sin, 0], [-sin, cos, 0]]);
  const R = codingRate(Z, .5);
  const Rc = subspaceRate(Z, U, 1, .5);
  const cost = knobs.lambda3 * nonzeros(Z);
  drawSpace(box, Z, U);
  bars(box, [["R", R], ["− R<sup>c</sup>", -Rc],
    ["− λ‖Z‖₀", -cost, "", `${show(-cost)} <small>= −λ × ${nonzeros(Z)}</small>`],
    ["objective", R - Rc - cost, "hot"]], 3.6);
  return {objective: R - Rc - cost};
}
// ---- 4: steps downhill on R^c
function gradient(box) {
  const slope = Z => times(1 / alphaOf(head, .5), subspaceRateGrad(Z, plane, 2, .5));
  const path = [head];
  for (let s = 0; s < knobs.steps4; s++) path.push(plus(path[s], slope(path[s]), -.1));
  const Z = path.at(-1);
  const cost = subspaceRate(Z, plane, 2, .5);
  const downhill = rowsIn(times(-1, slope(Z)));
  fill(box, "svg",
    downhill.map((_, i) => line(path.map(M => rowAt(M, i)), "faint")),
    rowsIn(Z).map((z, i) => arrow(z, downhill[i], "hot") + dot(z, .05)));
  const left = axis => percent(Math.sqrt(axesOf(Z)[axis] / axesOf(head)[axis]));
  fill(box, ".read", `<b>R<sup>c</sup> = ${show(cost)}</b>. The strong direction has
    ${left("large")} of its length left, the weak one ${left("small")}.`);
  return {cost};
}
// ---- 5: the same steps without the inverse
function withoutInverse(box) {
  const {eps5: eps, length5: length} = knobs;
  const Z = times(length, head);
  const beta = alphaOf(Z, eps);
  const exact = subspaceRateGrad(Z, plane, 2, eps);
  const two = subspaceRateGrad(Z, plane, 2, eps, true);
  const shortened = v => v.map(y => y * Math.min(.6, 1.2 / Math.hypot(...v)));
  const stepOf = (M, i) => shortened(rowAt(times(-1 / beta / length, M), i));
  fill(box, "svg", rowsIn(head).map((z, i) =>
    arrow(z, stepOf(exact, i), "dark") + arrow(z, stepOf(two, i), "hot") + dot(z, .05)));
  const row = (name, s) => [name, show(s), show(1 / (1 + s)), `<b class="hot">${show(1 - s)}</b>`];
  fill(box, ".read", table([["direction", "γ", "exact: 1/(1 + γ)", "two terms: 1 − γ"],
    row("strong", beta * axesOf(Z).large), row("weak", beta * axesOf(Z).small)]));
  return {exact: sizeOf(exact), two: sizeOf(two)};
}
// ---- 6: a head's Gram matrix, its softmax, a token's weights
function softmaxForGram(box) {
  const {L, w} = trace();
  const {token, root} = knobs;
  const own = headsOf(w, L.p)[knobs.head - 1];
  const G = linear(own, own);
  const scaled = times(root ? L.p ** -.5 : 1, G);
  const A = matrixOf(rowsIn(scaled).map(row => softmax(row)));
  const weights = rowAt(A, token);
  const most = Math.max(...weights);
  const [left, middle, right] = $$("figure canvas", box);
  heat(left, G, Math.max(...flat(G)) / 2);
  heat(middle, A, .2);
  paintCanvas(right, H / c.patch_size, H / c.patch_size, t =>
    t + 1 === token ? [...dark, 255] : [...hot, 255 * weights[t + 1] / most]);
  const row = (name, M) => [name, show(Math.min(...flat(M))), show(Math.max(...flat(M))),
    show(sumOf(rowAt(M, token)))];
  fill(box, ".read", table([["", "least", "most", "sum of the token’s row"],
    row("similarities", scaled), row("their softmax", A)]));
  return {most};
}
// ---- 7: what attention adds to R^c of the tokens, and less their mean after a LayerNorm
function leftOut(box) {
  const {L, Z, half} = trace();
  const U = unit(L.U);
  const rate = M => subspaceRate(M, U, L.p, .1);
  const normed = M => {
    const mean = linear(made(1, M.rows, () => 1 / M.rows), transposed(M)).at;
    const rest = made(M.rows, M.cols, t => M.at[t] - mean[t % M.cols]);
    return normalize(rest, {weight: made(1, M.cols, () => 1), eps: 1e-5});
  };
  const added = rate(half) - rate(Z);
  const afterNorm = rate(normed(half)) - rate(normed(Z));
  bars(box, [["as they are", added], ["after LN", afterNorm, "hot"]]);
  fill(box, ".read", `Before the step R<sup>c</sup> is ${show(rate(Z))}.`);
  return {attention_Rc: added, attention_Rc_normed: afterNorm};
}
// ---- 8 and 12: what a model with switches says of the picture, and its score on forty
function classify(box, model, switches, name) {
  const chances = chancesOf(model, pixels, switches);
  const best = [...chances.keys()].sort((i, j) => chances[j] - chances[i]).slice(0, 4);
  bars(box, best.map((k, i) =>
    [data.classes[k], chances[k], i ? "" : "hot", percent(chances[k])]), 1);
  score(box, model, {...switches});
  return {[name]: chances[0]};
}
async function score(box, model, switches) {        // ends as soon as another one begins
  let right = 0;
  box.scored = switches;
  for (let i = 0; i < 40; i++) {
    await new Promise(done => setTimeout(done));    // the page stays alive
    if (box.scored !== switches) return;
    const chances = chancesOf(model, pictureAt(many, i, H), switches);
    right += chances.indexOf(Math.max(...chances)) === data.many_labels[i];
    fill(box, ".score", `<b>${right} of ${i + 1}</b> drawn pictures right`);
  }
}
const wayBack = box => classify(box, models[0], {...asTrained, out: knobs.out}, "way_back");
const ablations = box => classify(box, model(), knobs, "chance");
// ---- 9: the two approximations of R(X)
function dictionary(box) {
  const {L, X, code} = trace();
  const DA = linear(code, L.D);
  const miss = 100 * sizeOf(plus(X, DA, -1)) / sizeOf(X);
  heat($("figure canvas", box), linear(L.Dt, L.Dt), 1);
  bars(box, [["R(X)", codingRate(X, .5)], ["R(DA)", codingRate(DA, .5), "hot"],
    ["R(A)", codingRate(code, .5), "hot"]]);
  fill(box, ".read", `‖X − DA‖ is <b>${Math.round(miss)} %</b> of ‖X‖.`);
  return {miss};
}
// ---- 10: a token before and after the step, and the LASSO
function sparsified(box) {
  const {L, X} = trace();
  const A = sparse(L, X, knobs);
  const relu = made(X.rows, X.cols, t => Math.max(0, X.at[t]));
  const D = times(knobs.noD ? 0 : 1, L.D);
  const costOf = M => lasso(M, X, D, knobs.lambd);
  const y = v => 55 - 50 * Math.max(-1, Math.min(1, v / 3));
  const sticks = (M, wide, kind) => rowsIn(M)[knobs.token].map((v, i) =>
    `<rect class="${kind}" x="${5 * i + (5 - wide) / 2}" y="${Math.min(y(v), 55)}"
    width="${wide}" height="${Math.abs(y(v) - 55)}"/>`);
  const threshold = knobs.eta * knobs.lambd;
  fill(box, "svg", sticks(X, 4, ""), sticks(A, 2, "hot"),
    [threshold, -threshold].map(v => line([[0, y(v)], [320, y(v)]], "dark")));
  fill(box, ".read", `Grey: a token of X. Colour: its code. Lines: ± ηλ.
    <b>${percent(nonzeros(A) / flat(A).length)}</b> of the entries of all codes are not 0.`);
  bars(box, firstHot({"the step’s code": costOf(A), "ReLU(X)": costOf(relu),
    "no code": costOf(times(0, X))}));
  return {lasso: 100 * costOf(A) / costOf(times(0, X))};
}
// ---- 11: the objective before, between and after the halves of a layer
function wholeLayer(box) {
  const {L, Z, half, code} = trace();
  const U = unit(L.U);
  const rates = [Z, half, code].map(M => codingRate(M, .1) - subspaceRate(M, U, L.p, .1));
  const costs = [Z, half, code].map(M => -knobs.lambda11 * nonzeros(M));
  const rise = rates[2] - rates[0];
  const rows = ([before, middle, after], name) =>
    [[`attention: ${name}`, middle - before], [`ISTA: ${name}`, after - middle]];
  bars(box, [...rows(rates, "R − R<sup>c</sup>"), ...rows(costs, "− λ‖Z‖₀"),
    ["the layer", rise + costs[2] - costs[0], "hot"]]);
  return {objective_added: rise};
}

const steps = [() => ({}), room, subspaces, objective, gradient, withoutInverse, softmaxForGram,
  leftOut, wayBack, dictionary, sparsified, wholeLayer, ablations];
// ---- What changes, and what is drawn again -----------------------------------------------------
const dirty = new Set();                            // steps to draw once they are in sight
function drawNow(n) {
  const box = $(`#s${n}`);
  dirty.delete(n);
  for (const canvas of $$(".sight", box))
    paintCanvas(canvas, H, H, t => [...pixels.subarray(3 * t, 3 * t + 3), 255]);
  return steps[n](box);
}
function drawInSight() {
  for (const n of dirty) {
    const {top, bottom} = $(`#s${n}`).getBoundingClientRect();
    if (bottom > -200 && top < innerHeight + 200) drawNow(n);
  }
}
function assign(changes) {
  Object.assign(knobs, changes);
  for (const input of $$(".live [name]")) {
    input[input.type === "checkbox" ? "checked" : "value"] = knobs[input.name];
    if (input.type === "range") input.nextElementSibling.value = show(knobs[input.name]);
  }
  if ("picture" in changes) look(pictureAt(shelf, knobs.picture - 1, H));
}
const stepsWith = names =>
  [...steps.keys()].filter(n => names.some(name => $(`#s${n} [name="${name}"]`)));

function redraw(names) {                            // the steps with inputs of these names
  stepsWith(names).forEach(n => dirty.add(n));
  drawInSight();
}
function set(changes) {
  assign(changes);
  redraw(Object.keys(changes));
}
// ---- What the hand does ------------------------------------------------------------------------
$$("[type=range]").forEach(input => input.after(document.createElement("output")));
$$(".choose").forEach(box => box.innerHTML = $(".choose").innerHTML);
for (const box of $$("[data-again]"))               // inputs that other steps have, too
  for (const name of box.dataset.again.split(" "))
    box.append($(`[name=${name}]`).parentElement.cloneNode(true));

const valueOf = ({type, checked, value}) =>
  type === "checkbox" ? +checked : type === "range" ? +value : value;
const initial = Object.fromEntries($$(".live [name]").map(input => [input.name, valueOf(input)]));

oninput = ({target}) => target.name && set({[target.name]: valueOf(target)});
onscroll = onresize = drawInSight;
onbeforeprint = () => dirty.forEach(drawNow);

for (const button of $$(".ask button"))
  button.onclick = () => {
    const box = button.closest(".ask");
    $$("button", box).forEach(other => other.ariaPressed = other === button);
    box.classList.add("answered");
    if (box.dataset.set) set({...asTrained, ...JSON.parse(box.dataset.set)});
  };

for (const canvas of $$(".sight"))                  // a brush
  canvas.onpointerdown = canvas.onpointermove = ({buttons, offsetX, offsetY}) => {
    if (!buttons) return;
    const scale = H / canvas.clientWidth;
    look(painted(pixels, scale * offsetX, scale * offsetY, knobs.colour));
    redraw(["colour"]);                             // those with a picture
  };

let held;                                           // a point of step 1
$("#s1 svg").onpointerdown = ({target}) => held = target.dataset.i;
$("#s1 svg").onpointermove = ({buttons, movementX, movementY}) => {
  if (!buttons || !held) return;
  const scale = 6.4 / $("#s1 svg").clientWidth / knobs.far1;
  cloud.at[2 * held] += scale * movementX;
  cloud.at[2 * held + 1] += scale * movementY;
  drawNow(1);
};
// ---- The comparison with PyTorch; with #test also every end of every knob ----------------------
function* stuck() {                                 // inputs with which a number is none
  for (const name in initial) {
    const {type, min, max, options} = $(`.live [name="${name}"]`);
    const ends = type === "range" ? [+min, +max] : [...options ?? [1]].map(o => o.value ?? o);
    for (const value of [...ends, initial[name]]) {
      assign({[name]: value});
      for (const n of stepsWith([name]))
        if (!Object.values(drawNow(n)).every(Number.isFinite)) yield `step ${n}, ${name} ${value}`;
    }
  }
  $$("[data-right]").forEach(button => button.click());
}

assign({...initial, picture: 1});
// steps return numbers by the names in data.known, which lesson.py has chosen
const shown = Object.assign({logits: check(data, models[0])}, ...steps.map((_, n) => drawNow(n)));
const wanted = {logits: 0, ...data.known};          // of logits their distance from PyTorch's
const apart = name => Math.abs(shown[name] - wanted[name]) / Math.max(1, Math.abs(wanted[name]));
const wrong = Object.keys(wanted).filter(name => !(apart(name) < 1e-3))
  .map(name => `${name} is ${shown[name]}, not ${wanted[name]}`);
const worst = Math.max(...Object.keys(wanted).map(apart));
const testing = location.hash === "#test";
const faults = [...wrong, ...testing ? stuck() : []];
const verdict = faults.length ? `FAIL: ${faults[0]}. ` : "PASS. ";
$("#alarm").hidden = !faults.length;
$("#agree").textContent = (testing ? verdict : "") +
  `PyTorch computed numbers of this page, too: they are at most ${worst.toExponential(1)} apart.`;
set(initial);

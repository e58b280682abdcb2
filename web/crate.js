// CRATE once more, in JavaScript, for both pages: the layers of model.py, in plain loops.
// A matrix is {rows, cols, at}: one token a row, as in model.py. A model is a tree like PyTorch's:
// model.layers[0].attention.U.weight is a matrix.
"use strict";
// ---- Matrices ----------------------------------------------------------------------------------
// Four rows are spare, because `linear` reads past the end
const matrix = (rows, cols) => ({rows, cols, at: new Float64Array((rows + 4) * cols)});

function made(rows, cols, value) {                              // value(place)
  const M = matrix(rows, cols);
  for (let t = 0; t < rows * cols; t++) M.at[t] = value(t);
  return M;
}

const rowAt = (M, i) => M.at.subarray(i * M.cols, (i + 1) * M.cols);
const rowsOf = (M, from, n) => ({rows: n - from, cols: M.cols, at: M.at.subarray(from * M.cols)});
const transposed = M => made(M.cols, M.rows, t => M.at[t % M.rows * M.cols + (t / M.rows | 0)]);
const plus = (M, N, share = 1) => made(M.rows, M.cols, t => M.at[t] + share * N.at[t]);

// X W^T + b, where most of a page's time goes: four rows of W at a time, so that a number of X that
// is read serves four sums
function linear(X, W, b) {
  const [x, w, d] = [X.at, W.at, X.cols];
  const out = matrix(X.rows, W.rows);
  for (let i = 0; i < X.rows; i++)
    for (let j = 0; j < W.rows; j += 4) {
      let [s0, s1, s2, s3] = [0, 0, 0, 0];
      for (let p = i * d, q = j * d; q < (j + 1) * d; p++, q++) {
        const u = x[p];
        s0 += u * w[q];
        s1 += u * w[q + d];
        s2 += u * w[q + 2 * d];
        s3 += u * w[q + 3 * d];
      }
      const sums = [s0, s1, s2, s3];
      for (let t = 0; t < 4 && j + t < W.rows; t++)
        out.at[i * W.rows + j + t] = sums[t] + (b ? b.at[j + t] : 0);
    }
  return out;
}

function sumOf(list, value = y => y) {
  let sum = 0;
  for (let i = 0; i < list.length; i++) sum += value(list[i]);
  return sum;
}

// Of tokens for all heads side by side the p columns of each head; and back
const headsOf = (w, p) => Array.from({length: w.cols / p}, (_, k) =>
  made(w.rows, p, t => w.at[(t / p | 0) * w.cols + k * p + t % p]));
function sideBySide(heads) {
  const {rows, cols: p} = heads[0];
  const width = p * heads.length;
  return made(rows, width, t => heads[t % width / p | 0].at[(t / width | 0) * p + t % p]);
}
// ---- A layer -----------------------------------------------------------------------------------
function normalize(Z, {weight, bias, eps}) {                    // LN
  const out = matrix(Z.rows, Z.cols);
  for (let i = 0; i < Z.rows; i++) {
    const row = rowAt(Z, i);
    const mean = sumOf(row) / Z.cols;
    const std = Math.sqrt(sumOf(row, y => (y - mean) ** 2) / Z.cols + eps);
    for (let j = 0; j < Z.cols; j++)
      out.at[i * Z.cols + j] = (row[j] - mean) / std * weight.at[j] + (bias ? bias.at[j] : 0);
  }
  return out;
}

function softmax(row, scale = 1) {                              // in place
  let most = -Infinity;
  for (let j = 0; j < row.length; j++) most = Math.max(most, row[j]);
  let sum = 0;
  for (let j = 0; j < row.length; j++) sum += row[j] = Math.exp(scale * (row[j] - most));
  for (let j = 0; j < row.length; j++) row[j] /= sum;
  return row;
}

// Keys or values, mixed with the previous token's by a share for each head
const mixed = (w, p, shares) => made(w.rows, w.cols, t => {
  const previous = w.at[t - w.cols] ?? 0;
  return w.at[t] + shares[t % w.cols / p | 0] * (previous - w.at[t]);
});

// Queries or keys, turned by their positions: each two numbers, in a plane
function turned(w, p) {
  const out = matrix(w.rows, w.cols);
  for (let t = 0; t < w.rows * w.cols; t += 2) {
    const angle = (t / w.cols | 0) * 1e4 ** (-(t % p) / p);
    const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
    out.at[t] = w.at[t] * cos - w.at[t + 1] * sin;
    out.at[t + 1] = w.at[t + 1] * cos + w.at[t] * sin;
  }
  return out;
}

// stack_k SSA(X | U_k) from w = U^* X, which is query, key and value; A: each head's weights
function attention({p, number, mix}, w, c, off) {
  const positioned = M => c.rotary ? turned(M, p) : M;
  const [keys, values] = mix ? [0, 1].map(i => mixed(w, p, rowAt(mix, i))) : [w, w];
  const [Q, K, V] = [positioned(w), positioned(keys), values].map(M => headsOf(M, p));
  const A = Q.map((_, k) => {
    const weights = linear(Q[k], K[k]);
    for (let i = 0; i < w.rows; i++) {
      const row = rowAt(weights, i);
      const end = c.causal ? i + 1 : w.rows;
      softmax(row.subarray(0, end), p ** -0.5);
      row.fill(0, off.includes(`${number}.${k + 1}`) ? 0 : end);
    }
    return weights;
  });
  return {A, ssa: sideBySide(A.map((weights, k) => linear(weights, transposed(V[k]))))};
}

// Z + W SSA(X); a decoder subtracts
function compress(L, Z, X, c, off) {
  const {A, ssa} = attention(L, linear(X, L.U), c, off);
  return {A, half: plus(Z, linear(ssa, L.W, L.bias), L.decodes ? -1 : 1)};
}

// ReLU(X - eta D^*(DX - X) - eta lambda)
function ista(X, {D, Dt}, {eta, lambd}) {
  const slope = linear(plus(linear(X, D), X, -1), Dt);
  return made(X.rows, X.cols, t => Math.max(0, X.at[t] - eta * slope.at[t] - eta * lambd));
}

// What a layer makes of Z: weights A, X where ISTA begins, the code, the output. Knobs are eta,
// lambd and the heads that are `off`
function layer(L, Z, c, knobs) {
  if (L.decodes) {                                              // the same in reverse
    const X = normalize(Z, L.norm1);
    const code = linear(X, L.D);
    const {A, half} = compress(L, code, normalize(code, L.norm2), c, knobs.off);
    return {A, X, code, out: half};
  }
  const {A, half} = compress(L, Z, normalize(Z, L.norm1), c, knobs.off);
  const X = normalize(half, L.norm2);
  const code = ista(X, L, knobs);
  return {A, X, code, out: code};
}
// ---- A model -----------------------------------------------------------------------------------
function forward(model, Z, knobs) {
  for (const L of model.layers) {
    if (L.number === model.c.layers + 1) Z = normalize(Z, model.norm);      // a decoder begins
    L.T = layer(L, Z, model.c, knobs);
    Z = L.T.out;
  }
}

// What the head reads in a layer's output Z: the patches' pixels, the next characters, or classes
function read({c, task, norm, decoder_norm, head, predict, embed}, Z) {
  const last = decoder_norm ?? norm;
  const Y = last ? normalize(Z, last) : Z;
  if (task === "mae") return linear(Y, predict.weight, predict.bias);
  if (task === "gpt") return linear(Y, embed.weight);
  const tokens = c.pool === "class" ? rowsOf(Y, 0, 1) : rowsOf(Y, 1, Y.rows);
  const pooled = linear(made(1, tokens.rows, () => 1 / tokens.rows), transposed(tokens));
  return linear(head[0] ? normalize(pooled, head[0]) : pooled, head[1].weight, head[1].bias);
}

const bytes = base64 => Uint8Array.from(atob(base64), y => y.charCodeAt());
const float16 = b => (b & 32768 ? -1 : 1) *
  (b & 31744 ? (1024 + (b & 1023)) * 2 ** ((b >> 10 & 31) - 25) : (b & 1023) * 2 ** -24);

function build(data, kind) {                    // "trained" or "untrained", in float16
  const numbers = new Uint16Array(bytes(data[kind]).buffer);
  const model = {c: data.config, task: data.task};
  const part = name => name.replace("encoder.", "").split(".")
    .reduce((tree, key) => tree[key] ??= {}, model);
  let first = 0;
  for (const [name, rows, cols] of data.tensors) {
    const own = numbers.subarray(first);
    Object.assign(part(name), made(rows, cols, t => float16(own[t])));
    first += rows * cols;
  }
  for (const name in data.eps) part(name).eps = data.eps[name];
  model.layers = [...Object.values(model.layers), ...Object.values(model.decoder ?? {})];
  model.layers.forEach((L, l) => Object.assign(L, {number: l + 1}, operators(L, data.config)));
  return model;
}

function operators(L, c) {                                      // a layer's, as `layer` takes them
  const {U: {weight: U}, W: {weight: W, bias}, mix} = L.attention;
  const D = L.D ?? L.sparsification.D;
  return {
    U, W, bias, D, Dt: transposed(D), p: U.rows / c.heads, decodes: !L.sparsification,
    mix: mix && made(2, c.heads, t => 1 / (1 + Math.exp(-mix.at[t]))),      // of keys, of values
  };
}
// ---- Pictures and text -------------------------------------------------------------------------
const pictureAt = (pixels, i, H) => pixels.subarray(3 * H * H * i, 3 * H * H * (i + 1));
const pixelOf = (patch, t, side, P) =>                          // a patch's pixel t in the picture
  ((patch / side | 0) * P + (t / P | 0)) * side * P + patch % side * P + t % P;

// Z^1 of a picture, uint8 (H, H, 3): the class token, and the patches, of which some are masked
function embedPicture({c, embed, positions, class_token, mask_token}, {mean, std}, pixels, masked) {
  const [P, d] = [c.patch_size, c.width];
  const side = c.image_size / P;
  const size = 3 * P * P;
  let X = made(side ** 2, size, t => {
    const k = t % 3;
    const pixel = pixelOf(t / size | 0, t % size / 3 | 0, side, P);
    return (pixels[3 * pixel + k] / 255 - mean[k]) / std[k];
  });
  for (const part of Object.values(embed))                      // LN, Linear, LN; or Linear alone
    X = part.eps ? normalize(X, part) : linear(X, part.weight, part.bias);
  const token = i => i === 0 ? class_token.at : masked.has(i - 1) ? mask_token.at : rowAt(X, i - 1);
  return made(1 + side ** 2, d, t => positions.at[t] + token(t / d | 0)[t % d]);
}

function painted(pixels, x, y, colour) {                        // with a round dab
  const rgb = colour.match(/\w\w/g).map(hex => parseInt(hex, 16));
  const H = Math.sqrt(pixels.length / 3);
  const out = pixels.slice();
  for (let i = 0; i < H * H; i++)
    if (Math.hypot(i % H - x, (i / H | 0) - y) < H / 16) out.set(rgb, 3 * i);
  return out;
}

function paintCanvas(canvas, width, height, rgba) {             // rgba(t) of pixel t
  const image = new ImageData(width, height);
  for (let t = 0; t < width * height; t++) image.data.set(rgba(t), 4 * t);
  Object.assign(canvas, {width, height}).getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

const idsOf = ({characters}, words) => [...words].map(y => [...characters, y].indexOf(y));
const embedText = ({embed: {weight}, positions}, ids) => made(ids.length, weight.cols, t =>
  rowAt(weight, ids[t / weight.cols | 0])[t % weight.cols] + (positions ? positions.at[t] : 0));
// ---- Numbers -----------------------------------------------------------------------------------
const show = y => (+(Math.abs(y) < 1e-6 ? 0 : y).toPrecision(3)).toLocaleString("en")
  .replace("-", "−");

// The largest difference from what PyTorch made of the first picture or text
function check(data, model) {
  const {config: c, task} = data;
  const Z = task === "gpt" ? embedText(model, idsOf(data, data.text)) :
    embedPicture(model, data, bytes(data.pictures), new Set(data.masked));
  forward(model, Z, {eta: c.eta, lambd: c.lambd, off: []});
  const out = read(model, model.layers.at(-1).T.out);
  const skip = task === "mae" ? out.cols : 0;                   // the class token's pixels
  return new Float32Array(bytes(data.expected).buffer).reduce((most, y, i) =>
    Math.max(most, Math.abs(y - out.at[skip + i])), 0);         // NaN stays NaN
}

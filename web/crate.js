// CRATE once more, in JavaScript, for both pages: the layers of model.py, in plain loops.
//
// A matrix is {rows, cols, at}: one token a row, as in model.py. It has four spare rows, because
// `multiply` reads past its end. A model is a tree: layers[0].attention.U.weight is a matrix.
"use strict";
const matrix = (rows, cols) => ({rows, cols, at: new Float32Array((rows + 4) * cols)});
const rowsOf = (M, from, n) => ({rows: n - from, cols: M.cols, at: M.at.subarray(from * M.cols)});
const transposed = M => made(M.cols, M.rows, t => M.at[t % M.rows * M.cols + (t / M.rows | 0)]);
function sumOf(list, value = y => y) {
  let sum = 0;
  for (let i = 0; i < list.length; i++) sum += value(list[i]);
  return sum;
}
const show = y => (+(Math.abs(y) < 1e-6 ? 0 : y).toPrecision(3)).toLocaleString("en")
  .replace("-", "−");

function made(rows, cols, value) {                              // value(place)
  const M = matrix(rows, cols);
  for (let t = 0; t < rows * cols; t++) M.at[t] = value(t);
  return M;
}

// X W^T + b, two rows by four columns at a time: a number that is read serves several sums
function multiply(X, W, b) {
  const d = X.cols, x = X.at, w = W.at, out = matrix(X.rows, W.rows);
  for (let i = 0; i < X.rows; i += 2)
    for (let j = 0; j < W.rows; j += 4) {
      let a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
      for (let p = i * d, end = p + d, q = j * d; p < end; p++, q++) {
        const u = x[p], v = x[p + d];
        const w0 = w[q], w1 = w[q + d], w2 = w[q + 2 * d], w3 = w[q + 3 * d];
        a0 += u * w0; a1 += u * w1; a2 += u * w2; a3 += u * w3;
        b0 += v * w0; b1 += v * w1; b2 += v * w2; b3 += v * w3;
      }
      const sums = [a0, a1, a2, a3, b0, b1, b2, b3];
      for (let t = 0; t < 8; t++) {
        const row = i + (t >> 2), k = j + t % 4;
        if (k < W.rows) out.at[row * W.rows + k] = sums[t] + (b ? b.at[k] : 0);
      }
    }
  return out;
}

function normalize(Z, {weight, bias, eps}) {                    // LN
  const d = Z.cols, out = matrix(Z.rows, d);
  for (let i = 0; i < Z.rows; i++) {
    const row = Z.at.subarray(i * d, i * d + d), mean = sumOf(row) / d;
    const std = Math.sqrt(sumOf(row, y => (y - mean) * (y - mean)) / d + eps);
    for (let j = 0; j < d; j++)
      out.at[i * d + j] = (row[j] - mean) / std * weight.at[j] + (bias ? bias.at[j] : 0);
  }
  return out;
}

function softmax(row, scale = 1) {                              // in place
  let most = -Infinity, sum = 0;
  for (let j = 0; j < row.length; j++) most = Math.max(most, row[j]);
  for (let j = 0; j < row.length; j++) sum += row[j] = Math.exp(scale * (row[j] - most));
  for (let j = 0; j < row.length; j++) row[j] /= sum;
  return row;
}

// stack_k SSA(X | U_k) from w = U^* X, which is query, key and value. With `shift`, keys and values
// are mixed with the previous token; with `rotary`, queries and keys turn by their positions
function attention({p, heads, mix, number}, w, c, off) {
  const n = w.rows, width = heads * p, ssa = matrix(n, width), A = [];
  const mixed = first => !mix ? w : made(n, width, t => w.at[t] +
    mix[first + (t % width / p | 0)] * ((w.at[t - width] ?? 0) - w.at[t]));
  const turned = M => {
    if (!c.rotary) return M;
    const out = made(n, width, t => M.at[t]);
    for (let i = 0; i < n; i++)
      for (let j = 0; j < width; j += 2) {
        const angle = i * 1e4 ** (-(j % p) / p), t = i * width + j, x = M.at[t], y = M.at[t + 1];
        out.at[t] = x * Math.cos(angle) - y * Math.sin(angle);
        out.at[t + 1] = y * Math.cos(angle) + x * Math.sin(angle);
      }
    return out;
  };
  const all = [turned(w), turned(mixed(0)), mixed(heads)];
  for (let k = 0; k < heads; k++) {
    const place = t => (t / p | 0) * width + k * p + t % p;     // of the head's number t in w
    const [Q, K, V] = all.map(({at}) => made(n, p, t => at[place(t)]));
    const weights = multiply(Q, K), isOff = off.includes(`${number}.${k + 1}`);
    A[k] = Array.from({length: n}, (_, i) => {
      const row = weights.at.subarray(i * n, i * n + n), end = c.causal ? i + 1 : n;
      softmax(row.subarray(0, end), p ** -0.5);
      return row.fill(0, isOff ? 0 : end);
    });
    const means = multiply(weights, transposed(V)).at;
    for (let t = 0; t < n * p; t++) ssa.at[place(t)] = means[t];
  }
  return {A, ssa};
}

// ReLU(A - eta D^*(D A - X) - eta lambda): ISTA is one step from A = X, ODL ista_steps from A = 0
function step(A, X, {D, Dt}, {eta, lambda}) {
  const y = multiply(A, D).at, G = multiply(made(X.rows, X.cols, t => y[t] - X.at[t]), Dt).at;
  return made(A.rows, A.cols, t => Math.max(0, A.at[t] - eta * G[t] - eta * lambda));
}

// What a layer makes of Z. Knobs are eta, lambda, the heads that are `off`, an entry to `hold`
function layer(L, Z, c, knobs) {
  const [number, entry, value] = knobs.hold, D_hat = L.sparsification?.D_hat;
  const held = M => number !== L.number ? M :
    made(M.rows, M.cols, t => t % M.cols === entry ? value : M.at[t]);
  const add = (Z, y, sign, scale) => made(Z.rows, Z.cols, t =>  // scale: LayerScale, if any
    Z.at[t] + sign * y.at[t] * (scale ? scale.at[t % Z.cols] : 1));
  const compress = (Z, X, sign) => {
    const {A, ssa} = attention(L, multiply(X, L.U), c, knobs.off);
    return {A, half: add(Z, multiply(ssa, L.W, L.bias), sign, L.scale1)};
  };
  if (L.decodes) {                                              // the same in reverse
    const X = normalize(Z, L.norm1), code = held(multiply(X, L.D));
    const T = compress(code, normalize(code, L.norm2), -1);
    return {...T, X, code, out: T.half};
  }
  const T = compress(Z, normalize(Z, L.norm1), 1), LN = normalize(T.half, L.norm2);
  let X = D_hat ? matrix(Z.rows, L.D.cols) : LN;                // what the last step begins at
  for (let s = 1; D_hat && s < c.ista_steps; s++) X = step(X, LN, L, knobs);
  const code = held(step(X, LN, L, knobs));                     // sparsify
  return {...T, X, code, out: D_hat ? add(T.half, multiply(code, D_hat), 1, L.scale2) : code};
}

function forward(model, Z, knobs) {
  for (const L of model.layers) {
    if (L.number === model.c.layers + 1) Z = normalize(Z, model.norm);      // a decoder begins
    L.T = layer(L, Z, model.c, knobs);
    Z = L.T.out;
  }
}

// What the head reads in a layer's output Z: the patches' pixels, the next characters, or classes
function read({c, task, norm, decoder_norm, head, predict, embed}, Z) {
  const last = decoder_norm ?? norm, d = Z.cols, Y = last ? normalize(Z, last) : Z;
  if (predict || task === "gpt") return multiply(Y, (predict ?? embed).weight, predict?.bias);
  const [from, n] = c.pool === "class" ? [0, 1] : [1, Z.rows], pooled = matrix(1, d);
  for (let t = from * d; t < n * d; t++) pooled.at[t % d] += Y.at[t] / (n - from);
  if (!head) return pooled;
  return multiply(head[0] ? normalize(pooled, head[0]) : pooled, head[1].weight, head[1].bias);
}

const bytes = base64 => Uint8Array.from(atob(base64), y => y.charCodeAt());
const float16 = b => (b & 32768 ? -1 : 1) *
  (b & 31744 ? (1024 + (b & 1023)) * 2 ** ((b >> 10 & 31) - 25) : (b & 1023) * 2 ** -24);
// The trained or the untrained model of the file
function build({config: c, task, output, eps, tensors, ...kinds}, kind) {
  const model = {c, task}, {at, scales} = kinds[kind];
  const numbers = new (scales ? Int8Array : Uint16Array)(bytes(at).buffer);
  const keysOf = name => name.replace("encoder.", "").split(".");
  const branch = keys => keys.reduce((tree, key) => tree[key] ??= {}, model);
  let end = 0;
  tensors.forEach(([name, rows, cols], i) => {
    const own = numbers.subarray(end, end += rows * cols);
    const keys = keysOf(name), leaf = keys.pop();
    branch(keys)[leaf] = made(rows, cols, t => scales ? own[t] * scales[i] : float16(own[t]));
  });
  for (const name in eps) branch(keysOf(name)).eps = eps[name];
  model.layers = [...Object.values(model.layers), ...Object.values(model.decoder ?? {})];
  model.layers.forEach((L, l) => {
    const {U: {weight: U}, W, mix} = L.attention, D = L.D ?? L.sparsification.D;
    const own = output === "transpose" ? U : transposed(U);
    const s = output === "negative" ? -c.step_size : c.step_size;           // of crate-c, -n, -t
    L.number = l + 1;
    L.decodes = !!L.D;                                          // a layer of a decoder
    L.heads = c.heads;
    L.p = U.rows / c.heads;
    L.U = U;
    L.W = W?.weight ?? made(U.cols, U.rows, t => s * own.at[t]);
    L.bias = W?.bias;
    L.D = D;
    L.Dt = transposed(D);
    L.mix = mix?.at.map(y => 1 / (1 + Math.exp(-y)));           // shares a_k, then b_k
  });
  return model;
}

const pixelOf = (patch, t, side, P) =>                          // a patch's pixel t in the picture
  ((patch / side | 0) * P + (t / P | 0)) * side * P + patch % side * P + t % P;
// Z^1 of a picture, uint8 (H, H, 3): the class token, and the patches, of which some are masked
function embedPicture({c, embed, positions, class_token, mask_token}, {mean, std}, pixels, masked) {
  const P = c.patch_size, side = c.image_size / P, d = c.width, size = 3 * P * P;
  let X = made(side ** 2, size, t => {
    const k = t % 3, y = pixels[3 * pixelOf(t / size | 0, (t % size - k) / 3, side, P) + k];
    return (y / 255 - mean[k]) / std[k];
  });
  for (const part of Object.values(embed))                      // LN, Linear, LN; or Linear alone
    X = part.eps ? normalize(X, part) : multiply(X, part.weight, part.bias);
  return made(1 + side ** 2, d, t => positions.at[t] + (t < d ? class_token.at[t] :
    masked.has((t / d | 0) - 1) ? mask_token.at[t % d] : X.at[t - d]));
}

function painted(pixels, x, y, colour) {                        // with a round dab
  const rgb = colour.match(/\w\w/g).map(hex => parseInt(hex, 16)), out = pixels.slice();
  const H = Math.sqrt(pixels.length / 3);
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
const embedText = ({embed: {weight: {cols: d, at}}, positions}, ids) =>
  made(ids.length, d, t => at[ids[t / d | 0] * d + t % d] + (positions ? positions.at[t] : 0));
// The largest difference from what PyTorch made of the first picture or text
function check(data, model) {
  const {config: c, task} = data, knobs = {eta: c.eta, lambda: c.lambd, off: [], hold: []};
  const Z = task === "gpt" ? embedText(model, idsOf(data, data.text)) :
    embedPicture(model, data, bytes(data.pictures), new Set(data.masked));
  forward(model, Z, knobs);
  const out = read(model, model.layers.at(-1).T.out), skip = task === "mae" ? out.cols : 0;
  return new Float32Array(bytes(data.expected).buffer).reduce((most, y, i) =>
    Math.max(most, Math.abs(y - out.at[skip + i])), 0);         // NaN stays NaN
}

function halfLogdet(w, first, p, n, a) {                        // 1/2 logdet(I + a w^* w)
  const G = Float64Array.from({length: p * p}, (_, i) => i % (p + 1) ? 0 : 1), x = w.at;
  let sum = 0;
  for (let i = 0, row = first; i < n; i++, row += w.cols)       // its upper half: it is symmetric
    for (let s = 0; s < p; s++)
      for (let t = s, y = a * x[row + s]; t < p; t++) G[s * p + t] += y * x[row + t];
  for (let s = 0; s < p; s++) {                                 // by elimination
    sum += Math.log(G[s * p + s]) / 2;
    for (let r = s + 1; r < p; r++)
      for (let t = r, y = G[s * p + r] / G[s * p + s]; t < p; t++) G[r * p + t] -= y * G[s * p + t];
  }
  return sum;
}

// ---- Matrices; the objective and its slopes. U is a layer's, [U_1 .. U_K]^*
const matrixOf = rows => made(rows.length, rows[0].length, t =>
  rows[t / rows[0].length | 0][t % rows[0].length]);
const flat = M => M.at.subarray(0, M.rows * M.cols);
const rowsIn = M => Array.from({length: M.rows}, (_, i) =>
  [...M.at.subarray(i * M.cols, (i + 1) * M.cols)]);
const plus = (M, N, share = 1) => made(M.rows, M.cols, t => M.at[t] + share * N.at[t]);
const times = (s, M) => made(M.rows, M.cols, t => s * M.at[t]);
const sizeOf = M => Math.sqrt(sumOf(flat(M), y => y * y));
const nonzeros = M => sumOf(flat(M), y => y !== 0);

const codingRate = (Z, eps) => halfLogdet(Z, 0, Z.cols, Z.rows, Z.cols / (Z.rows * eps ** 2));
const ratesOf = (w, p, eps) =>                                  // the sum of each p columns' R
  sumOf(Array.from({length: w.cols / p}, (_, k) =>
    halfLogdet(w, k * p, p, w.rows, p / (w.rows * eps ** 2))));
const subspaceRate = (Z, U, p, eps) => ratesOf(multiply(Z, U), p, eps);        // R^c, Eq. (13)
const unit = U => times(Math.sqrt(U.rows) / sizeOf(U), U);        // as long as orthonormal bases
const atNorm = (M, N) => times(sizeOf(N) / sizeOf(M), M);

function inverse(M) {                                           // of a positive matrix, in place
  const d = M.rows, G = M.at;
  for (let s = 0; s < d; s++) {                                 // Gauss and Jordan
    const pivot = G[s * d + s];
    G[s * d + s] = 1;
    for (let t = 0; t < d; t++) G[s * d + t] /= pivot;
    for (let r = 0; r < d; r++) {
      if (r === s) continue;
      const y = G[r * d + s];
      G[r * d + s] = 0;
      for (let t = 0; t < d; t++) G[r * d + t] -= y * G[s * d + t];
    }
  }
  return M;
}

// grad R(Z) = a Z (I + a Z^* Z)^-1, a = d / (n eps^2). With `terms` I - a Z^* Z is the inverse
function rateGrad(Z, eps, terms = false) {
  const d = Z.cols, a = d / (Z.rows * eps ** 2), G = multiply(transposed(Z), transposed(Z));
  const plus = s => made(d, d, t => (t % (d + 1) ? 0 : 1) + s * a * G.at[t]);
  const out = multiply(Z, terms ? plus(-1) : inverse(plus(1)));
  return made(Z.rows, d, t => a * out.at[t]);
}

function subspaceRateGrad(Z, U, p, eps, terms) {                // Eq. (31), (33): heads', lifted
  const w = multiply(Z, U), lifted = matrix(Z.rows, U.rows);
  for (let first = 0; first < U.rows; first += p) {
    const place = t => (t / p | 0) * U.rows + first + t % p;
    const slope = rateGrad(made(Z.rows, p, t => w.at[place(t)]), eps, terms);
    for (let t = 0; t < Z.rows * p; t++) lifted.at[place(t)] = slope.at[t];
  }
  return multiply(lifted, transposed(U));
}

const lasso = (X, A, D, lambda) =>                               // Eq. (41)
  sizeOf(plus(X, multiply(A, D), -1)) ** 2 / 2 + lambda * sumOf(flat(A), Math.abs);

// The objective of crate.py and its slopes, in JavaScript, for the lesson. crate.js has matrices.
// U is a layer's, [U_1 .. U_K]^*, with p columns for a head.
"use strict";

const matrixOf = rows =>
  made(rows.length, rows[0].length, t => rows[t / rows[0].length | 0][t % rows[0].length]);
const rowsIn = M => Array.from({length: M.rows}, (_, i) => [...rowAt(M, i)]);
const flat = M => M.at.subarray(0, M.rows * M.cols);
const times = (s, M) => made(M.rows, M.cols, t => s * M.at[t]);
const gram = M => linear(transposed(M), transposed(M));       // Z Z^*, where a token is a column
const sizeOf = M => Math.sqrt(sumOf(flat(M), y => y * y));
const nonzeros = M => sumOf(flat(M), y => y !== 0);
const unit = U => times(Math.sqrt(U.rows) / sizeOf(U), U);      // as long as orthonormal bases

// The inverse of a positive matrix, by Gauss and Jordan, and the log of its determinant
function inverted(M) {
  const d = M.rows;
  const inverse = made(d, d, t => M.at[t]);
  let logdet = 0;
  for (let s = 0; s < d; s++) {
    const own = rowAt(inverse, s);
    const pivot = own[s];
    logdet += Math.log(pivot);
    own[s] = 1;
    own.forEach((y, t) => own[t] = y / pivot);
    for (let r = 0; r < d; r++) {
      if (r === s) continue;
      const row = rowAt(inverse, r);
      const share = row[s];
      row[s] = 0;
      row.forEach((y, t) => row[t] = y - share * own[t]);
    }
  }
  return {inverse, logdet};
}
// ---- Rates -------------------------------------------------------------------------------------
const alphaOf = (Z, eps) => Z.cols / (Z.rows * eps ** 2);
const identityPlus = (s, M) => made(M.rows, M.cols, t => (t % (M.cols + 1) ? 0 : 1) + s * M.at[t]);

const codingRate = (Z, eps) =>                                  // R, Eq. (8)
  inverted(identityPlus(alphaOf(Z, eps), gram(Z))).logdet / 2;
const subspaceRate = (Z, U, p, eps) =>                          // R^c, Eq. (13)
  sumOf(headsOf(linear(Z, U), p), head => codingRate(head, eps));

// grad R(Z) = a Z (I + a Z^* Z)^-1. With `terms` I - a Z^* Z stands for the inverse
function codingRateGrad(Z, eps, terms) {
  const a = alphaOf(Z, eps);
  const G = gram(Z);
  const inverse = terms ? identityPlus(-a, G) : inverted(identityPlus(a, G)).inverse;
  return times(a, linear(Z, inverse));
}

const subspaceRateGrad = (Z, U, p, eps, terms) =>               // Eq. (31), (33)
  linear(sideBySide(headsOf(linear(Z, U), p).map(head => codingRateGrad(head, eps, terms))),
    transposed(U));

const lasso = (A, X, D, lambda) =>                              // Eq. (41)
  sizeOf(plus(X, linear(A, D), -1)) ** 2 / 2 + lambda * sumOf(flat(A), Math.abs);

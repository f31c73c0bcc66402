/**
 * Products of matrices, each a Float32Array of its rows.
 *
 * R rows of x, I numbers in a row of x, O outputs. Most of a translation's time is spent here, so the loops compute
 * several sums at once: each number that they read serves more than one of them. Sums are in float64, as JavaScript's
 * numbers are.
 */

/** Return x W^T + b (R, O) for x (R, I), W (O, I) and b (O) or null. */
export function linear(x, weight, inputs, bias = null) {
  const rows = x.length / inputs;
  const outputs = weight.length / inputs;
  const y = new Float32Array(rows * outputs);
  const wide = new Float64Array(x); // x is read once for each output, and only W is worth its memory in float32
  let row = 0;
  for (; row + 4 <= rows; row += 4) multiplyFourRows(wide, weight, inputs, outputs, row, y);
  for (; row < rows; row++) multiplyRow(wide, weight, inputs, outputs, row, y);
  if (bias !== null) {
    for (let p = 0; p < y.length; p += outputs) {
      for (let o = 0; o < outputs; o++) y[p + o] += bias[o];
    }
  }
  return y;
}

/** Four rows, such as beams or source tokens, by two outputs: six numbers are read for eight products. */
function multiplyFourRows(x, weight, inputs, outputs, row, y) {
  const x0 = row * inputs, x1 = x0 + inputs, x2 = x1 + inputs, x3 = x2 + inputs;
  const y0 = row * outputs, y1 = y0 + outputs, y2 = y1 + outputs, y3 = y2 + outputs;
  let output = 0;
  for (; output + 2 <= outputs; output += 2) {
    const w0 = output * inputs, w1 = w0 + inputs;
    let a0 = 0, a1 = 0, b0 = 0, b1 = 0, c0 = 0, c1 = 0, d0 = 0, d1 = 0;
    for (let i = 0; i < inputs; i++) {
      const v = weight[w0 + i], w = weight[w1 + i];
      const a = x[x0 + i], b = x[x1 + i], c = x[x2 + i], d = x[x3 + i];
      a0 += a * v; a1 += a * w;
      b0 += b * v; b1 += b * w;
      c0 += c * v; c1 += c * w;
      d0 += d * v; d1 += d * w;
    }
    y[y0 + output] = a0; y[y0 + output + 1] = a1;
    y[y1 + output] = b0; y[y1 + output + 1] = b1;
    y[y2 + output] = c0; y[y2 + output + 1] = c1;
    y[y3 + output] = d0; y[y3 + output + 1] = d1;
  }
  for (; output < outputs; output++) { // the last of an odd number
    for (let r = row; r < row + 4; r++) y[r * outputs + output] = dot(x, r * inputs, weight, output * inputs, inputs);
  }
}

/** One row by four outputs. */
function multiplyRow(x, weight, inputs, outputs, row, y) {
  const p = row * inputs;
  const q = row * outputs;
  let output = 0;
  for (; output + 4 <= outputs; output += 4) {
    const w0 = output * inputs, w1 = w0 + inputs, w2 = w1 + inputs, w3 = w2 + inputs;
    let a = 0, b = 0, c = 0, d = 0;
    for (let i = 0; i < inputs; i++) {
      const v = x[p + i];
      a += v * weight[w0 + i];
      b += v * weight[w1 + i];
      c += v * weight[w2 + i];
      d += v * weight[w3 + i];
    }
    y[q + output] = a; y[q + output + 1] = b; y[q + output + 2] = c; y[q + output + 3] = d;
  }
  for (; output < outputs; output++) y[q + output] = dot(x, p, weight, output * inputs, inputs);
}

/** Return the product of `length` numbers of a from p and of b from q. */
function dot(a, p, b, q, length) {
  let sum = 0;
  for (let i = 0; i < length; i++) sum += a[p + i] * b[q + i];
  return sum;
}

/** Return the rows of a matrix as views into it. */
export function splitRows(matrix, width) {
  const rows = [];
  for (let p = 0; p < matrix.length; p += width) rows.push(matrix.subarray(p, p + width));
  return rows;
}

/** Return the matrix of rows of `width` numbers. */
export function joinRows(rows, width) {
  const matrix = new Float32Array(rows.length * width);
  rows.forEach((row, index) => matrix.set(row, index * width));
  return matrix;
}

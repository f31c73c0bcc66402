/** The safetensors format: the header's length in 8 bytes, the header in JSON, then the numbers of all tensors. */

const damaged = (got) =>
  new Error(`model.safetensors: damaged; got ${got}, expected a complete safetensors file. Load it again.`);

/**
 * Return float16 numbers as float32.
 *
 * The exponent's bias is 15 in float16 and 127 in float32, so a number whose bits are moved by 13 places is 2^112 times
 * too small. The largest exponent is that of infinity and NaN.
 */
function widenFloat16(halves) {
  const numbers = new Float32Array(halves.length);
  const bits = new Uint32Array(numbers.buffer);
  for (let i = 0; i < halves.length; i++) {
    bits[i] = ((halves[i] & 0x8000) << 16) | ((halves[i] & 0x7fff) << 13);
    if ((halves[i] & 0x7c00) === 0x7c00) bits[i] |= 0x7f800000;
    else numbers[i] *= 2 ** 112;
  }
  return numbers;
}

/** Return bfloat16 numbers, the upper halves of float32, as float32. */
function widenBfloat16(halves) {
  const numbers = new Float32Array(halves.length);
  const bits = new Uint32Array(numbers.buffer);
  for (let i = 0; i < halves.length; i++) bits[i] = halves[i] << 16;
  return numbers;
}

const READERS = {
  F32: (buffer, start, bytes) => new Float32Array(buffer, start, bytes / 4),
  F16: (buffer, start, bytes) => widenFloat16(new Uint16Array(buffer, start, bytes / 2)),
  BF16: (buffer, start, bytes) => widenBfloat16(new Uint16Array(buffer, start, bytes / 2)),
};

/** Return the header {name: {dtype, shape, data_offsets}} and the byte at which the numbers start. */
function readHeader(buffer) {
  if (buffer.byteLength < 8) throw damaged(`${buffer.byteLength} bytes`);
  const start = 8 + Number(new DataView(buffer).getBigUint64(0, true));
  if (start > buffer.byteLength) throw damaged(`a header of ${start - 8} bytes in a file of ${buffer.byteLength}`);
  try {
    const { __metadata__, ...header } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, start - 8)));
    return { header, start };
  } catch (error) {
    throw damaged(`a header that is not JSON (${error.message})`);
  }
}

/**
 * Return {name: Float32Array} for a file's ArrayBuffer.
 *
 * float32 tensors are views into the buffer, without a copy. The shapes are left to the model, which knows them.
 */
export function readSafetensors(buffer) {
  const { header, start } = readHeader(buffer);
  const tensors = {};
  for (const [name, { dtype, data_offsets: offsets }] of Object.entries(header)) {
    const [begin, end] = offsets.map((offset) => start + offset);
    if (!Object.hasOwn(READERS, dtype)) {
      const names = Object.keys(READERS).join(", ");
      throw new Error(`${name}: unknown type of numbers; got ${dtype}, expected ${names}. Save the model as float32.`);
    }
    if (end > buffer.byteLength) throw damaged(`${buffer.byteLength} bytes where the header has ${end}`);
    const isAligned = begin % 4 === 0; // a view must begin at a multiple of a number's bytes
    const [data, first] = isAligned ? [buffer, begin] : [buffer.slice(begin, end), 0];
    tensors[name] = READERS[dtype](data, first, end - begin);
  }
  return tensors;
}

/**
 * The model of "Attention Is All You Need" (Vaswani et al. 2017): encoder, cached decoder and output projection.
 *
 * Classes and names are those of the package's layers.py, stacks.py and model.py. A text
 * is a matrix with a row of d_model numbers for each token.
 *
 * S source tokens, T target tokens so far, k beams, H heads, V vocabulary.
 */
import { activationFunction } from "./activations.js";
import { joinRows, linear, splitRows } from "./matrix.js";

/** The paper's base model (Table 3), whose values a config.json may leave out. */
const BASE = {
  vocab_size: 37000, d_model: 512, encoder_layers: 6, decoder_layers: 6, num_heads: 8, d_k: null, d_v: null, d_ff: 2048,
  activation_function: "relu", position_embedding: "sinusoidal", max_position_embeddings: 1024, attention_bias: false,
  attention_window: null, layer_norm_eps: 1e-6, scale_embedding: true, tie_word_embeddings: true,
  bos_token_id: 0, pad_token_id: 1, eos_token_id: 2, decoder_start_token_id: null, upsampling: 2,
};
const FAMILIES = ["vaswani_transformer", "vaswani_ctc"];

/** Return a config.json with the values that it leaves out. */
function completeConfig(config) {
  const { model_type: family, attention_window: reach } = config;
  if (!FAMILIES.includes(family)) {
    const names = FAMILIES.join(" or ");
    throw new Error(`config.json: a model without JavaScript; got ${family}, expected ${names}. Choose such a model.`);
  }
  if (reach) {
    throw new Error(`attention_window: not supported; got ${reach}, expected null. Choose a model without a window.`);
  }
  const complete = { ...BASE, ...config };
  complete.d_k ??= complete.d_model / complete.num_heads;
  complete.d_v ??= complete.d_model / complete.num_heads;
  return complete;
}

/** The tensors of a module, by names that begin with that of the module. */
class Parameters {
  constructor(tensors, name = "") {
    this.tensors = tensors;
    this.name = name;
  }

  /** Return the tensors of a module within this one. */
  of(name) {
    return new Parameters(this.tensors, `${this.name}${name}.`);
  }

  /** Return a tensor of `count` numbers. */
  get(name, count) {
    const tensor = this.tensors[this.name + name];
    if (tensor?.length === count) return tensor;
    const got = `${tensor?.length ?? "none"}, expected ${count}`;
    throw new Error(`${this.name}${name}: numbers do not fit config.json; got ${got}. Load both files again.`);
  }
}

/** x W^T + b. */
class Linear {
  constructor(parameters, inputs, outputs, hasBias) {
    this.inputs = inputs;
    this.weight = parameters.get("weight", outputs * inputs);
    this.bias = hasBias ? parameters.get("bias", outputs) : null;
  }

  forward(x) {
    return linear(x, this.weight, this.inputs, this.bias);
  }
}

/** PE(pos, 2i) = sin(pos / 10000^(2i / d_model)) and PE(pos, 2i + 1) = cos(same), with angles in float32 (3.5). */
class SinusoidalPositions {
  constructor({ d_model }) {
    this.frequencies = Float32Array.from({ length: d_model / 2 }, (_, i) => 10000 ** (-2 * i / d_model));
  }

  row(position) {
    const encoding = [];
    for (const frequency of this.frequencies) {
      const angle = Math.fround(position * frequency);
      encoding.push(Math.sin(angle), Math.cos(angle));
    }
    return encoding;
  }
}

/** A table of learned positions (Table 3, row E). */
class LearnedPositions {
  constructor({ max_position_embeddings: size, d_model }, parameters) {
    this.rows = splitRows(parameters.get("table.weight", size * d_model), d_model);
  }

  row(position) {
    if (position < this.rows.length) return this.rows[position];
    const size = this.rows.length;
    throw new Error(`text: longer than the learned positions; got ${position + 1} tokens, expected ${size}. Cut it.`);
  }
}

/** The embeddings times sqrt(d_model) (3.4) plus the positional encodings (3.5). */
class InputEmbedding {
  constructor(config, table, parameters) {
    const Positions = config.position_embedding === "learned" ? LearnedPositions : SinusoidalPositions;
    this.positions = new Positions(config, parameters.of("input_embedding.positions"));
    this.table = table;
    this.width = config.d_model;
    this.scale = config.scale_embedding ? Math.sqrt(config.d_model) : 1;
  }

  /** Return the embedded tokens, each at its position. */
  forward(tokens, positions) {
    const rows = tokens.map((token) => this.table.subarray(token * this.width, (token + 1) * this.width));
    return this.addPositions(joinRows(rows, this.width).map((number) => number * this.scale), positions);
  }

  addPositions(x, positions) {
    positions.forEach((position, row) => {
      const encoding = this.positions.row(position);
      for (let i = 0; i < this.width; i++) x[row * this.width + i] += encoding[i];
    });
    return x;
  }
}

/** Replace scores by their softmax. */
function softmax(scores) {
  let max = -Infinity;
  for (const score of scores) max = Math.max(max, score);
  let sum = 0;
  for (let i = 0; i < scores.length; i++) sum += scores[i] = Math.exp(scores[i] - max);
  for (let i = 0; i < scores.length; i++) scores[i] /= sum;
}

/** MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V) (3.2.2). */
class MultiHeadAttention {
  constructor({ num_heads, d_model, d_k, d_v, attention_bias: hasBias }, parameters) {
    Object.assign(this, { num_heads, d_model, d_k, d_v });
    this.q_proj = new Linear(parameters.of("q_proj"), d_model, num_heads * d_k, hasBias);
    this.k_proj = new Linear(parameters.of("k_proj"), d_model, num_heads * d_k, hasBias);
    this.v_proj = new Linear(parameters.of("v_proj"), d_model, num_heads * d_v, hasBias);
    this.o_proj = new Linear(parameters.of("o_proj"), num_heads * d_v, d_model, hasBias);
  }

  /** Return the keys and values of a text, a row of each for a token. */
  projectKeyValues(text) {
    return {
      keys: splitRows(this.k_proj.forward(text), this.num_heads * this.d_k),
      values: splitRows(this.v_proj.forward(text), this.num_heads * this.d_v),
    };
  }

  /** Equation (1), softmax(Q K^T / sqrt(d_k)) V, for one query and each head; the weights are (H, keys). */
  attend(query, { keys, values }) {
    const { num_heads: heads, d_k, d_v } = this;
    const output = new Float32Array(heads * d_v);
    const weights = new Float32Array(heads * keys.length);
    for (let head = 0; head < heads; head++) {
      const row = weights.subarray(head * keys.length, (head + 1) * keys.length);
      for (let j = 0; j < keys.length; j++) {
        const key = keys[j];
        let score = 0;
        for (let i = head * d_k; i < (head + 1) * d_k; i++) score += query[i] * key[i];
        row[j] = score / Math.sqrt(d_k);
      }
      softmax(row);
      for (let j = 0; j < values.length; j++) {
        const value = values[j], weight = row[j];
        for (let i = head * d_v; i < (head + 1) * d_v; i++) output[i] += weight * value[i];
      }
    }
    return { output, weights };
  }

  /** Return the output, and the weights of each row of x; memories[row] are the keys and values that it sees. */
  attendRows(x, memories) {
    const queries = splitRows(this.q_proj.forward(x), this.num_heads * this.d_k);
    const attended = queries.map((query, row) => this.attend(query, memories[row]));
    const concatenated = joinRows(attended.map(({ output }) => output), this.num_heads * this.d_v);
    return { output: this.o_proj.forward(concatenated), weights: attended.map(({ weights }) => weights) };
  }
}

/** Attention of each token to the tokens of its own text (3.2.3). */
class SelfAttention extends MultiHeadAttention {
  /**
   * Return output and weights.
   *
   * Without caches, the rows of x are one text, and each sees all of it. With caches, a row is the next token of a
   * beam. It joins the keys and values of that beam's earlier tokens, so there is nothing to mask.
   */
  forward(x, caches = null) {
    const { keys, values } = this.projectKeyValues(x);
    if (caches === null) return this.attendRows(x, keys.map(() => ({ keys, values })));
    caches.forEach((cache, beam) => {
      cache.keys.push(keys[beam]);
      cache.values.push(values[beam]);
    });
    return this.attendRows(x, caches);
  }
}

/** Attention of each target token to all source tokens, "encoder-decoder attention" (3.2.3). */
class CrossAttention extends MultiHeadAttention {
  forward(x, source) {
    return this.attendRows(x, new Array(x.length / this.d_model).fill(source));
  }
}

/** Position-wise feed-forward network, equation (2): FFN(x) = max(0, x W_1 + b_1) W_2 + b_2 (3.3). */
class FeedForward {
  constructor({ d_model, d_ff, activation_function: name }, parameters) {
    this.fc1 = new Linear(parameters.of("fc1"), d_model, d_ff, true);
    this.activation = activationFunction(name, (part) => parameters.get(`activation.${part}`, 1));
    this.fc2 = new Linear(parameters.of("fc2"), d_ff, d_model, true);
  }

  forward(x) {
    const inner = this.fc1.forward(x);
    for (let i = 0; i < inner.length; i++) inner[i] = this.activation(inner[i]);
    return this.fc2.forward(inner);
  }
}

/** Residual connection and post-norm: LayerNorm(x + Sublayer(x)) (3.1). */
class AddAndNorm {
  constructor({ d_model, layer_norm_eps: eps }, parameters) {
    Object.assign(this, { width: d_model, eps });
    this.weight = parameters.get("norm.weight", d_model);
    this.bias = parameters.get("norm.bias", d_model);
  }

  forward(x, sublayer) {
    const { width, eps, weight, bias } = this;
    const y = new Float32Array(x.length);
    for (let p = 0; p < x.length; p += width) {
      let mean = 0, variance = 0;
      for (let i = 0; i < width; i++) mean += (y[p + i] = x[p + i] + sublayer[p + i]) / width;
      for (let i = 0; i < width; i++) variance += (y[p + i] - mean) ** 2 / width;
      const deviation = Math.sqrt(variance + eps);
      for (let i = 0; i < width; i++) y[p + i] = ((y[p + i] - mean) / deviation) * weight[i] + bias[i];
    }
    return y;
  }
}

/** Self-attention and feed-forward network, each with residual connection and norm (3.1). */
class EncoderLayer {
  constructor(config, parameters) {
    this.self_attn = new SelfAttention(config, parameters.of("self_attn"));
    this.self_attn_add_norm = new AddAndNorm(config, parameters.of("self_attn_add_norm"));
    this.feed_forward = new FeedForward(config, parameters.of("feed_forward"));
    this.feed_forward_add_norm = new AddAndNorm(config, parameters.of("feed_forward_add_norm"));
  }

  /** Return the layer's output and the weights of each token. */
  forward(x) {
    const { output, weights } = this.self_attn.forward(x);
    x = this.self_attn_add_norm.forward(x, output);
    return { x: this.feed_forward_add_norm.forward(x, this.feed_forward.forward(x)), weights };
  }
}

/** Self-attention, cross-attention and feed-forward network, each with residual connection and norm (3.1). */
class DecoderLayer {
  constructor(config, parameters) {
    this.self_attn = new SelfAttention(config, parameters.of("self_attn"));
    this.self_attn_add_norm = new AddAndNorm(config, parameters.of("self_attn_add_norm"));
    this.cross_attn = new CrossAttention(config, parameters.of("cross_attn"));
    this.cross_attn_add_norm = new AddAndNorm(config, parameters.of("cross_attn_add_norm"));
    this.feed_forward = new FeedForward(config, parameters.of("feed_forward"));
    this.feed_forward_add_norm = new AddAndNorm(config, parameters.of("feed_forward_add_norm"));
  }

  /** Return the layer's output and both weights of each row, given the source's keys and values. */
  forward(x, source, caches = null) {
    const own = this.self_attn.forward(x, caches);
    x = this.self_attn_add_norm.forward(x, own.output);
    const crossed = this.cross_attn.forward(x, source);
    x = this.cross_attn_add_norm.forward(x, crossed.output);
    x = this.feed_forward_add_norm.forward(x, this.feed_forward.forward(x));
    return { x, decoder: own.weights, cross: crossed.weights };
  }
}

/** The numbers 0 to count - 1. */
export const range = (count) => Array.from({ length: count }, (_, index) => index);

export class Transformer {
  /** Build the model of a config.json and the tensors of `readSafetensors`. */
  constructor(config, tensors) {
    this.config = completeConfig(config);
    const { vocab_size: size, d_model: width, tie_word_embeddings: isTied } = this.config;
    const parameters = new Parameters(tensors);
    const model = parameters.of("model");
    const table = model.get("shared.weight", size * width); // of source, target and, if tied, projection (3.4)
    this.encoder_embedding = new InputEmbedding(this.config, table, model.of("encoder"));
    this.encoder_layers = range(this.config.encoder_layers).map(
      (layer) => new EncoderLayer(this.config, model.of(`encoder.layers.${layer}`)));
    this.decoder_embedding = new InputEmbedding(this.config, table, model.of("decoder"));
    this.decoder_layers = range(this.config.decoder_layers).map(
      (layer) => new DecoderLayer(this.config, model.of(`decoder.layers.${layer}`)));
    this.projection = isTied ? table : parameters.get("lm_head.weight", size * width);
  }

  /** Return the memory, a row for each of the source's tokens, and the weights[layer][token] (H, S). */
  encode(source) {
    let x = this.encoder_embedding.forward(source, range(source.length));
    const weights = [];
    for (const layer of this.encoder_layers) {
      const output = layer.forward(x);
      x = output.x;
      weights.push(output.weights);
    }
    return { memory: x, weights };
  }

  /** Return the logits, V for each row of the decoder's output. */
  project(x) {
    return linear(x, this.projection, this.config.d_model);
  }

  /** Return the decoder of the targets of one source. */
  decoder(memory) {
    return new Decoder(this, memory);
  }

  /**
   * Return the logits[t] (V) of each next token of a known target, which begins with the start token, and the weights
   * of the three uses of attention (3.2.3): encoder[layer][s] and cross[layer][t] (H, S), decoder[layer][t] (H, t + 1).
   */
  forward(source, target) {
    const { memory, weights } = this.encode(source);
    const decoder = this.decoder(memory);
    const steps = target.map((token) => decoder.step([token]));
    const byLayer = (use) => this.decoder_layers.map((_, layer) => steps.map((step) => step[use][layer][0]));
    const logits = steps.map((step) => step.logits);
    return { logits, encoder: weights, decoder: byLayer("decoder"), cross: byLayer("cross") };
  }
}

/** The state of a search over the targets of one source; it begins with one beam. */
class Decoder {
  constructor(model, memory) {
    this.model = model;
    this.source = model.decoder_layers.map((layer) => layer.cross_attn.projectKeyValues(memory));
    this.caches = [model.decoder_layers.map(() => ({ keys: [], values: [] }))]; // [beam][layer], earlier tokens
    this.position = 0;
  }

  /** Read the next token of each beam; return the logits (k, V) of the one after it, and weights[layer][beam]. */
  step(tokens) {
    let x = this.model.decoder_embedding.forward(tokens, tokens.map(() => this.position));
    this.position += 1;
    const decoder = [];
    const cross = [];
    for (const [index, layer] of this.model.decoder_layers.entries()) {
      const output = layer.forward(x, this.source[index], this.caches.map((layers) => layers[index]));
      x = output.x;
      decoder.push(output.decoder);
      cross.push(output.cross);
    }
    return { logits: this.model.project(x), decoder, cross };
  }

  /** Continue beam `beams[i]` as beam i; the rows of keys and values are shared, only lists of them are copied. */
  reorder(beams) {
    const copy = ({ keys, values }) => ({ keys: [...keys], values: [...values] });
    this.caches = beams.map((beam) => this.caches[beam].map(copy));
  }
}

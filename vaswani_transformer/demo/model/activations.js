/** Activation functions of the feed-forward networks, by the name in config.json; the paper's is "relu" (3.3). */

const sigmoid = (x) => 1 / (1 + Math.exp(-x));
const softplus = (x) => Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x)));
const clip = (x, least, most) => Math.min(Math.max(x, least), most);

// Of a polynomial in t = 1 / (1 + |x| / 2), highest power first (Press et al., Numerical Recipes, "erfcc").
const ERF_COEFFICIENTS = [
  0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
  -1.26551223,
];

/** Return the error function; the error of 1 - erf(|x|) is below 1.2e-7 of its value. */
function erf(x) {
  const t = 1 / (1 + Math.abs(x) / 2);
  let polynomial = 0;
  for (const coefficient of ERF_COEFFICIENTS) polynomial = polynomial * t + coefficient;
  const complement = t * Math.exp(polynomial - x * x);
  return x >= 0 ? 1 - complement : complement - 1;
}

const gelu = (x) => (x / 2) * (1 + erf(x / Math.SQRT2));
const geluByTanh = (x) => (x / 2) * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
const silu = (x) => x * sigmoid(x);

const FUNCTIONS = {
  relu: (x) => Math.max(0, x),
  relu2: (x) => Math.max(0, x) ** 2,
  relu6: (x) => clip(x, 0, 6),
  leaky_relu: (x) => (x > 0 ? x : 0.01 * x),
  linear: (x) => x,
  sigmoid,
  tanh: Math.tanh,
  silu,
  swish: silu,
  hardswish: (x) => (x * clip(x + 3, 0, 6)) / 6,
  mish: (x) => x * Math.tanh(softplus(x)),
  sqrtsoftplus: (x) => Math.sqrt(softplus(x)),
  laplace: (x) => (1 + erf((x - 0.707107) / (0.282095 * Math.SQRT2))) / 2,
  gelu,
  gelu_python: gelu,
  gelu_10: (x) => clip(gelu(x), -10, 10),
  gelu_fast: geluByTanh,
  gelu_new: geluByTanh,
  gelu_accurate: geluByTanh,
  gelu_pytorch_tanh: geluByTanh,
  gelu_python_tanh: geluByTanh,
  quick_gelu: (x) => x * sigmoid(1.702 * x),
};

/** Those with parameters of their own; `get` returns a parameter by name. */
const LEARNED = {
  prelu: (get) => {
    const [slope] = get("weight");
    return (x) => (x > 0 ? x : slope * x);
  },
  xielu: (get) => {
    const [beta] = get("beta"), [eps] = get("eps");
    const positive = softplus(get("alpha_p")[0]), negative = beta + softplus(get("alpha_n")[0]);
    return (x) => beta * x + (x > 0 ? positive * x * x : (Math.expm1(Math.min(x, eps)) - x) * negative);
  },
};

/** Return the function of a name; `get` returns its parameters, of one number each. */
export function activationFunction(name, get) {
  if (Object.hasOwn(FUNCTIONS, name)) return FUNCTIONS[name];
  if (Object.hasOwn(LEARNED, name)) return LEARNED[name](get);
  const names = [...Object.keys(FUNCTIONS), ...Object.keys(LEARNED)].join(", ");
  throw new Error(`activation_function: unknown; got ${name}, expected one of ${names}.`);
}

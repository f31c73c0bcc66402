/** The files of the models: beside the page, or inside it, in base64. */
import { byId } from "./dom.js";

function bytesOf(base64) {
  const characters = atob(base64);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < characters.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

/** Return a file's bytes as an ArrayBuffer. */
async function readFile(path) {
  const inside = byId(path);
  if (inside) return bytesOf(inside.textContent).buffer;
  let answer;
  try {
    answer = await fetch(path);
  } catch {
    throw new Error(`${path}: cannot be loaded. Check that the server of this page still runs, and load the page again.`);
  }
  if (!answer.ok) throw new Error(`${path}: cannot be loaded (${answer.status}). Write the page again with vaswani-demo.`);
  return answer.arrayBuffer();
}

async function readJson(path) {
  const text = new TextDecoder().decode(await readFile(path));
  try {
    return JSON.parse(text);
  } catch {
    throw new Error(`${path}: damaged; it is not JSON. Write the page again with vaswani-demo.`);
  }
}

/** Return the contents of a model's files. */
export async function readModel(folder) {
  const [config, generation, tokenizer, weights] = await Promise.all([
    ...["config.json", "generation_config.json", "tokenizer.json"].map((name) => readJson(`${folder}/${name}`)),
    readFile(`${folder}/model.safetensors`),
  ]);
  return { config, generation, tokenizer, weights };
}

/** Start the worker whose script is beside the page, or inside it. */
export function startWorker({ worker: path }) {
  if (path) return new Worker(path, { type: "module" });
  return new Worker(URL.createObjectURL(new Blob([byId("worker").textContent], { type: "text/javascript" })));
}

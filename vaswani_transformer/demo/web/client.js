/** Calls of the worker that holds the models. */
export class ModelClient {
  constructor(worker) {
    this.worker = worker;
    this.waiting = new Map();
    this.latestId = {};
    this.nextId = 0;
    this.failure = null; // of the worker: no call gets an answer
    worker.onmessage = ({ data: { id, result, error } }) => {
      const call = this.waiting.get(id);
      this.waiting.delete(id);
      if (error === undefined) call?.resolve(result);
      else call?.reject(new Error(error));
    };
    worker.onerror = (event) => {
      this.failure = new Error(`The model's thread did not start (${event.message ?? "no reason"}). Use a browser of 2023 or later.`);
      for (const { reject } of this.waiting.values()) reject(this.failure);
      this.waiting.clear();
    };
  }

  /** Call a function of the worker; the buffers of `transfer` are moved there. */
  call(call, values, transfer = []) {
    const id = this.nextId++;
    this.latestId[call] = id;
    if (this.failure !== null) return Promise.reject(this.failure);
    this.worker.postMessage({ id, call, values }, transfer);
    return new Promise((resolve, reject) => this.waiting.set(id, { resolve, reject }));
  }

  /** Call a function of the worker; null if it has been called again before it answered. */
  async latest(call, values) {
    const answer = this.call(call, values);
    const id = this.latestId[call];
    try {
      const result = await answer;
      return id === this.latestId[call] ? result : null;
    } catch (error) {
      if (id === this.latestId[call]) throw error;
      return null;
    }
  }
}

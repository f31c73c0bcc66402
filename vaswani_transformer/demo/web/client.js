/** Calls of the worker that holds the models. */
export class ModelClient {
  constructor(worker) {
    this.worker = worker;
    this.waiting = new Map();
    this.latestId = {};
    this.nextId = 0;
    worker.onmessage = ({ data: { id, result, error } }) => {
      const { resolve, reject } = this.waiting.get(id);
      this.waiting.delete(id);
      if (error === undefined) resolve(result);
      else reject(new Error(error));
    };
    this.failed = new Promise((_, reject) => {
      worker.onerror = (event) => reject(new Error(`The model's thread did not start (${event.message ?? "no reason"}). Use a browser of 2023 or later.`));
    });
    this.failed.catch(() => {}); // each call reports it
  }

  /** Call a function of the worker; the buffers of `transfer` are moved there. */
  call(call, values, transfer = []) {
    const id = this.nextId++;
    this.latestId[call] = id;
    const answer = new Promise((resolve, reject) => this.waiting.set(id, { resolve, reject }));
    this.worker.postMessage({ id, call, values }, transfer);
    return Promise.race([answer, this.failed]);
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

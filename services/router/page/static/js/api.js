/** Calls to the server that this page came from. */

const KEY = "kvcommons-key";

/** What the server refused, in its own words. */
export class ApiError extends Error {
  /** @param {number} status 0 where the server was not reached
   *  @param {{message?: string, code?: string|null, param?: string|null}} body */
  constructor(status, body) {
    super(body.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = body.code ?? null;
    this.param = body.param ?? null;
  }
}

/** The API key of this browser session: it is gone when the tab is closed. */
export class Key {
  get value() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set value(key) {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  }
}

export class Api {
  /** @param {Key} key
   *  @param {() => void} refused called when the server wants a key, or another one */
  constructor(key, refused) {
    this.#key = key;
    this.#refused = refused;
  }

  #key;
  #refused;

  /** @param {string} path relative to the page @returns {Promise<any>} */
  get(path) {
    return this.#json("GET", path);
  }

  /** @param {string} path @param {object} body @returns {Promise<any>} */
  post(path, body) {
    return this.#json("POST", path, body);
  }

  /** @param {string} path @returns {Promise<any>} */
  delete(path) {
    return this.#json("DELETE", path);
  }

  /** The events of a stream as they come. Throws ApiError for an event that tells of an error, and for a stream that
   *  breaks off before its end.
   *  @param {string} method @param {string} path @param {{body?: object, signal?: AbortSignal}} options */
  async *stream(method, path, { body, signal } = {}) {
    const response = await this.#call(method, path, body, signal);
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(response.status, event.error);
      yield event;
    }
    throw new ApiError(0, { message: "the connection broke before the answer was complete" });
  }

  async #json(method, path, body) {
    const response = await this.#call(method, path, body);
    return response.json();
  }

  async #call(method, path, body, signal) {
    const headers = {};
    if (this.#key.value) headers.Authorization = `Bearer ${this.#key.value}`;
    if (body) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError(0, { message: "the server cannot be reached" });
    }
    if (response.ok) return response;
    if (response.status === 401) this.#refused();
    const found = await response.json().catch(() => ({}));
    throw new ApiError(response.status, found.error ?? {});
  }
}

/** The data of server-sent events, however the bytes are cut.
 *  @param {ReadableStream<Uint8Array>} body @returns {AsyncGenerator<string>} */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop() ?? "";
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data: "));
        if (lines.length) yield lines.map((line) => line.slice(6)).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Calls of this server's API, with the key that the reader has typed in.
//
// The key stays in this tab: sessionStorage, sent as Authorization, never in a cookie or an address.

const KEY = "thermocline-key";

export const keyOf = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (key) =>
  key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY);

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function headers(more = {}) {
  const key = keyOf();
  return key ? { authorization: `Bearer ${key}`, ...more } : more;
}

// Of several models that the server has, the one that is looked at; "" = the first.
const MODEL = "thermocline-model";

export const modelOf = () => sessionStorage.getItem(MODEL) ?? "";
export const setModel = (name) => sessionStorage.setItem(MODEL, name);

export function ofModel(path) {
  const name = modelOf();
  return name ? `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(name)}` : path;
}

// Returns the answer's JSON; throws ApiError with the server's own words.
export async function call(method, path, body, more = {}) {
  const answer = await send(method, path, body, more);
  return answer.json();
}

export async function send(method, path, body, more = {}, signal = undefined) {
  const options = { method, cache: "no-store", credentials: "omit", headers: headers(more), signal };
  if (method === "POST") {
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body ?? {});
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.", "unreachable");
  }
  if (answer.ok || answer.status === 304) return answer;
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // not our server's shape; its status says enough
  }
  const words = error.message ?? `The server answered ${answer.status}.`;
  throw new ApiError(answer.status, words, error.code ?? "");
}

export const sessionPath = (row, verb = "") =>
  ofModel(`v1/sessions/${encodeURIComponent(row.id)}${verb && `/${verb}`}${tenantOf(row)}`);

// Admins name whose session they mean; everybody else can mean their own only.
const tenantOf = (row) => (row.tenant ? `?tenant=${encodeURIComponent(row.tenant)}` : "");

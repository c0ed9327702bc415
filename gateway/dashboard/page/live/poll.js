// Keeps the store up to date: one snapshot a second, and an empty answer while nothing changes.
//
// A hidden page stops asking after a while: a page that is not seen costs nothing.

import * as store from "./store.js";
import { ApiError, ofModel, send } from "./api.js";

const ROWS = 2000; // sessions that are listed, those used last
const EVERY_MS = 1_000;
const ANSWER_MS = 15_000; // that a snapshot may take
const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 15_000;
const HIDDEN_MS = 60_000;

let running = null; // AbortController of the loop that asks
let hiddenTimer = 0;

export function start() {
  stop();
  run((running = new AbortController()));
}

export function stop() {
  running?.abort();
  running = null;
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (document.hidden) hiddenTimer = setTimeout(stop, HIDDEN_MS);
  else if (!running && store.connection.value.phase !== "asking") start();
});

async function run(mine) {
  let wait = FIRST_RETRY_MS;
  let tag = "";
  while (!mine.signal.aborted) {
    try {
      tag = await ask(mine, tag);
      wait = FIRST_RETRY_MS;
      await pause(mine, EVERY_MS);
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof ApiError && error.status === 401) return askForKey(error);
      store.connection.value = { phase: "lost", why: error.message };
      await pause(mine, wait * (0.75 + Math.random() / 2));
      wait = Math.min(MAX_RETRY_MS, wait * 2);
    }
  }
}

function askForKey(error) {
  running = null;
  store.reset();
  store.connection.value = { phase: "asking", why: error.message };
}

// Returns the tag of what the store has now.
async function ask(mine, tag) {
  const one = AbortSignal.any([mine.signal, AbortSignal.timeout(ANSWER_MS)]);
  const answer = await send("GET", ofModel(`v1/snapshot?limit=${ROWS}`), null, tag ? { "if-none-match": tag } : {}, one);
  store.takeClock(answer.headers.get("date"));
  if (answer.status !== 304) store.snapshot(await answer.json());
  if (mine.signal.aborted) return tag;
  if (store.connection.value.phase !== "live") store.connection.value = { phase: "live", why: "" };
  return answer.headers.get("etag") ?? "";
}

function pause(mine, ms) {
  return new Promise((done) => {
    const timer = setTimeout(done, ms);
    mine.signal.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });
}

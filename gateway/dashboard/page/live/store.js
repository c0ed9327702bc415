// All that the page knows, as signals. Snapshots replace it, changes are folded in.

import { batch, signal } from "../vendor/signals.js";

export const TIERS = ["hot", "ram", "disk", "redis"];
export const TIER_NAMES = { hot: "Hot", ram: "Packed RAM", disk: "Disk", redis: "Redis" };
const MAX_MOVES = 60;
const MAX_POINTS = 900; // twice as many as the server's steps of an hour
const HOUR_S = 3600;
const MAX_STEPS = 32; // versions of the rows of which it is known what changed
const TELL_MS = 300;

export const connection = signal({ phase: "connecting", why: "" });
export const server = signal(null);
export const now = signal(null);
export const memory = signal(null);
export const quality = signal(null);
export const numSessions = signal(0); // may be more than are listed
export const tick = signal(Date.now() / 1000); // the server's clock, once a second
export const rows = new Map();
export const rowsVersion = signal(0);
export const clients = new Map(); // how many sessions each client and each tenant has
export const tenants = new Map();
export const places = signal(emptyPlaces());
export const moves = signal([]); // sessions that went from one tier to another, newest first
export const points = signal(0); // grows with ``history``
export const history = { at: [], prompt: [], answer: [] };
let clockAhead = 0; // the server's clock less this one's

export const rowKey = (row) => `${row.tenant ?? ""}\u0000${row.id}`;
export const idOf = (key) => key.slice(key.indexOf("\u0000") + 1);
// An address may name a session without its tenant, also for a reader who sees those of all.
export function findKey(key) {
  rowsVersion.value;
  if (!key || rows.has(key) || !key.startsWith("\u0000")) return key;
  for (const known of rows.keys()) if (idOf(known) === idOf(key)) return known;
  return key;
}
const HOT_STATES = new Set(["active", "idle", "saving", "hibernating"]);
export const isHot = (row) => HOT_STATES.has(row.state);
// Where a conversation's KV is now: one of TIERS, or "" if nowhere yet.
export const placeOf = (row) => (isHot(row) ? "hot" : (row.tier ?? ""));
export const serverTime = () => Date.now() / 1000 + clockAhead;

setInterval(() => {
  if (!document.hidden) tick.value = serverTime();
}, 1000);

export function snapshot(said) {
  batch(() => {
    clear();
    recall(said.hour);
    moves.value = [];
    takeParts(said);
    takeRows(said.sessions ?? []);
    publish();
  });
}

// More rows of a snapshot. Views hear of them now and then, and of the last; until then nothing has
// them, or a list would have some of them twice.
export function more(said) {
  waiting.push(said.sessions ?? []);
  if (said.left > 0 && performance.now() - published < TELL_MS) return;
  batch(() => {
    for (const some of waiting.splice(0)) takeRows(some);
    publish();
  });
}

export function change(said) {
  batch(() => {
    takeParts(said);
    takeRows(said.sessions ?? []);
    dropRows(said.gone ?? []);
    publish();
  });
}

export function reset() {
  batch(() => {
    clear();
    publish();
    for (const part of [server, now, memory, quality]) part.value = null;
    moves.value = [];
    recall(null);
  });
}

// What happened until now was not heard of: the lines are not drawn over that time.
export function interrupted() {
  if (history.at.length) push(serverTime(), null, null);
  noted = false;
}

// A browser whose clock is wrong must not show wrong ages. ``date`` is the answer's header.
export function takeClock(date) {
  const off = Date.parse(date) / 1000 - Date.now() / 1000;
  clockAhead = Math.abs(off) > 3 ? off : 0;
  tick.value = serverTime();
}

function takeParts(said) {
  tick.value = serverTime();
  if (said.server) server.value = { ...server.value, ...said.server };
  if (said.memory) memory.value = { ...memory.value, ...said.memory };
  if (said.quality !== undefined) quality.value = said.quality;
  if (said.num_sessions !== undefined) numSessions.value = said.num_sessions;
  if (said.moves) takeMoves(said.moves);
  if (said.now) {
    now.value = { ...now.value, ...said.now };
    note(now.value);
  }
}

// A move may come twice: by a snapshot, and by the change that follows.
function takeMoves(said) {
  const last = moves.value[0]?.number ?? 0;
  const fresh = said.filter((x) => x.number > last).reverse();
  if (fresh.length) moves.value = [...fresh, ...moves.value].slice(0, MAX_MOVES);
}

// ---- speeds

let noted = false; // the newest point is of a moment, not the mean of a step

function recall(hour) {
  noted = false;
  const steps = hour?.prompt_tokens_per_s ?? [];
  history.at = steps.map((_, i) => Math.round(hour.since + (i + 0.5) * hour.step_s));
  history.prompt = [...steps];
  history.answer = [...(hour?.answer_tokens_per_s ?? [])];
  points.value += 1;
}

function note(figures) {
  const at = serverTime();
  const last = history.at.length - 1;
  // Only changes are sent: until a moment ago all was as it had been.
  if (noted && at - history.at[last] > 2) push(at - 1, history.prompt[last], history.answer[last]);
  push(at, figures.prompt_tokens_per_s ?? null, figures.answer_tokens_per_s ?? null);
  noted = true;
}

function push(at, prompt, answer) {
  const second = Math.round(at);
  const same = history.at.at(-1) >= second;
  for (const [name, value] of Object.entries({ at: second, prompt, answer })) {
    if (same) history[name].pop();
    history[name].push(value);
  }
  if (history.at.length > MAX_POINTS) thin(second - HOUR_S);
  points.value += 1;
}

// Keeps every second point of the older half, and none from before an hour.
function thin(since) {
  const half = history.at.length / 2;
  const kept = history.at.map((at, i) => at >= since && (i >= half || i % 2 === 0));
  for (const name of Object.keys(history)) history[name] = history[name].filter((_, i) => kept[i]);
}

// ---- sessions

// What became of rows, version by version, so that a sorted list need not be sorted anew:
// {version, gone: rows that are no longer as they were, come: rows as they are now}; whole: all are.
const steps = [];
let step = { gone: new Set(), come: new Set(), whole: false };
let counted = emptyPlaces();
let published = 0;
const waiting = [];

function clear() {
  rows.clear();
  clients.clear();
  tenants.clear();
  counted = emptyPlaces();
  waiting.length = 0;
  step.whole = true;
}

function publish() {
  if (!step.whole && step.gone.size + step.come.size === 0) return;
  published = performance.now();
  rowsVersion.value += 1;
  places.value = { ...counted };
  steps.push({ version: rowsVersion.value, ...step });
  if (steps.length > MAX_STEPS) steps.shift();
  step = { gone: new Set(), come: new Set(), whole: false };
}

// All that changed after a version; null = it is not known, or everything did.
export function changesSince(version) {
  const later = steps.filter((x) => x.version > version);
  if (later.length !== rowsVersion.peek() - version || later.some((x) => x.whole)) return null;
  const gone = new Set();
  const come = new Set();
  for (const x of later) {
    for (const row of x.gone) if (!come.delete(row)) gone.add(row);
    for (const row of x.come) come.add(row);
  }
  return { gone, come };
}

function put(key, row, before) {
  rows.set(key, row);
  if (before) remove(before);
  step.come.add(row);
  add(row, 1);
}

function remove(row) {
  if (!step.come.delete(row)) step.gone.add(row);
  add(row, -1);
}

function takeRows(said) {
  for (const row of said) {
    const key = rowKey(row);
    const before = rows.get(key);
    put(key, before ? { ...before, ...row } : row, before);
  }
}

function emptyPlaces() {
  return Object.fromEntries(
    ["", ...TIERS].map((name) => [name, { sessions: 0, bytes: 0, saved: 0, pinned: 0 }]),
  );
}

function dropRows(gone) {
  for (const said of gone) {
    const key = typeof said === "string" ? rowKey({ id: said }) : rowKey(said);
    const before = rows.get(key);
    if (!before) continue;
    rows.delete(key);
    remove(before);
  }
}

function add(row, by) {
  const sum = (counted[placeOf(row)] ??= { sessions: 0, bytes: 0, saved: 0, pinned: 0 });
  sum.sessions += by;
  sum.bytes += by * (row.bytes ?? 0);
  sum.saved += by * (row.saved_s ?? 0);
  if (row.pinned) sum.pinned += by;
  tally(clients, row.client, by);
  tally(tenants, row.tenant, by);
}

function tally(counts, name, by) {
  const count = (counts.get(name) ?? 0) + by;
  if (count) counts.set(name, count);
  else counts.delete(name);
}

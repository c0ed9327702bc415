// All that the page knows, as signals. Snapshots replace it, changes are folded in.

import { batch, signal } from "../vendor/signals.js";

export const TIERS = ["hot", "ram", "disk", "redis"];
export const TIER_NAMES = { hot: "Hot", ram: "Packed RAM", disk: "Disk", redis: "Redis" };
const MAX_MOVES = 60;
const MAX_POINTS = 600;

export const connection = signal({ phase: "connecting", why: "" });
export const server = signal(null);
export const now = signal(null);
export const memory = signal(null);
export const quality = signal(null);
export const numSessions = signal(0); // may be more than are listed
export const tick = signal(Date.now() / 1000); // the server's clock, once a second
export const rows = new Map();
export const rowsVersion = signal(0);
export const places = signal(emptyPlaces());
export const moves = signal([]); // sessions that went from one tier to another, newest first
export const points = signal(0); // grows with ``history``
export const history = { at: [], prompt: [], answer: [], memory: [] };
let clockAhead = 0; // the server's clock less this one's
let numMoves = 0;

export const rowKey = (row) => `${row.tenant ?? ""}\u0000${row.id}`;
export const idOf = (key) => key.slice(key.indexOf("\u0000") + 1);
// An address may name a session without its tenant, also for a reader who sees those of all.
export function findKey(key) {
  rowsVersion.value;
  if (!key || rows.has(key) || !key.startsWith("\u0000")) return key;
  for (const known of rows.keys()) if (idOf(known) === idOf(key)) return known;
  return key;
}
export const isHot = (row) =>
  row.state === "active" || row.state === "idle" || row.state === "hibernating";
// Where a conversation's KV is now: one of TIERS, or "" if nowhere yet.
export const placeOf = (row) => (isHot(row) ? "hot" : (row.tier ?? ""));
export const serverTime = () => Date.now() / 1000 + clockAhead;

setInterval(() => {
  if (!document.hidden) tick.value = serverTime();
}, 1000);

export function snapshot(said) {
  batch(() => {
    rows.clear();
    places.value = emptyPlaces();
    takeParts(said);
    putRows(said.sessions ?? [], false);
    rowsVersion.value += 1;
  });
}

export function change(said) {
  batch(() => {
    takeParts(said);
    const changed = putRows(said.sessions ?? [], true) + dropRows(said.gone ?? []);
    if (changed) rowsVersion.value += 1;
  });
}

export function reset() {
  batch(() => {
    rows.clear();
    places.value = emptyPlaces();
    rowsVersion.value += 1;
    for (const part of [server, now, memory, quality]) part.value = null;
    moves.value = [];
    for (const line of Object.values(history)) line.length = 0;
  });
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
  if (said.now) {
    now.value = { ...now.value, ...said.now };
    note(now.value);
  }
}

function note(figures) {
  history.at.push(Math.round(serverTime()));
  history.prompt.push(figures.prompt_tokens_per_s ?? null);
  history.answer.push(figures.answer_tokens_per_s ?? null);
  history.memory.push(figures.memory_available_bytes ?? null);
  for (const line of Object.values(history)) {
    if (line.length > MAX_POINTS) line.splice(0, line.length - MAX_POINTS);
  }
  points.value += 1;
}

// ---- sessions

function emptyPlaces() {
  return Object.fromEntries(
    ["", ...TIERS].map((name) => [name, { sessions: 0, bytes: 0, saved: 0, pinned: 0 }]),
  );
}

function putRows(changed, tell) {
  const counted = { ...places.value };
  const moved = [];
  for (const said of changed) {
    const key = rowKey(said);
    const before = rows.get(key);
    const row = { ...before, ...said };
    rows.set(key, row);
    if (before) add(counted, before, -1);
    add(counted, row, 1);
    const to = placeOf(row);
    const from = before ? placeOf(before) : "";
    if (tell && to && from !== to) {
      moved.push({ number: ++numMoves, at: serverTime(), row, from, to });
    }
  }
  places.value = counted;
  if (moved.length) moves.value = [...moved.reverse(), ...moves.value].slice(0, MAX_MOVES);
  return changed.length;
}

function dropRows(gone) {
  const counted = { ...places.value };
  for (const said of gone) {
    const key = typeof said === "string" ? rowKey({ id: said }) : rowKey(said);
    const before = rows.get(key);
    if (!before) continue;
    add(counted, before, -1);
    rows.delete(key);
  }
  places.value = counted;
  return gone.length;
}

function add(counted, row, by) {
  const name = placeOf(row);
  const sum = counted[name] ?? { sessions: 0, bytes: 0, saved: 0, pinned: 0 };
  counted[name] = {
    sessions: sum.sessions + by,
    bytes: sum.bytes + by * (row.bytes ?? 0),
    saved: sum.saved + by * (row.saved_s ?? 0),
    pinned: sum.pinned + (row.pinned ? by : 0),
  };
}

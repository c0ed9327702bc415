// Figures as people read them. What is not known is a dash, never a zero.

export const UNKNOWN = "–";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const whole = new Intl.NumberFormat("en");
const known = (x) => typeof x === "number" && Number.isFinite(x);

export function count(x) {
  return known(x) ? whole.format(Math.round(x)) : UNKNOWN;
}

export function bytes(x) {
  if (!known(x)) return UNKNOWN;
  let unit = 0;
  while (Math.abs(x) >= 1024 && unit < UNITS.length - 1) {
    x /= 1024;
    unit += 1;
  }
  return `${x >= 100 || unit === 0 ? Math.round(x) : trimmed(x)} ${UNITS[unit]}`;
}

export function rate(x) {
  return known(x) ? (x >= 100 ? count(x) : trimmed(x)) : UNKNOWN;
}

export function ratio(x) {
  return known(x) && x > 0 ? `${x.toFixed(1)}×` : UNKNOWN;
}

// Packed bytes are always compared with what the same KV takes in bf16.
export function density(x) {
  return known(x) && x > 0 ? `${ratio(x)} denser than bf16` : "exact";
}

// What was not computed again: its time, where the speed of prefill is known, else its tokens.
export function saved(took, tokens) {
  if (known(took)) return seconds(took);
  return tokens ? plural(tokens, "token") : UNKNOWN;
}

export function percent(x) {
  return known(x) ? `${(100 * x).toFixed(x >= 0.9995 || x < 0.1 ? 1 : 0)} %` : UNKNOWN;
}

export function fixed(x, digits) {
  return known(x) ? x.toFixed(digits) : UNKNOWN;
}

// A length of time: 0.24 s, 8.1 s, 3 min, 2 h 10 min, 4 d.
export function seconds(x) {
  if (!known(x)) return UNKNOWN;
  if (x < 0.0005) return "0 s";
  if (x < 1) return `${Math.round(x * 1000)} ms`;
  if (x < 60) return `${trimmed(x)} s`;
  if (x < 3600) return `${Math.round(x / 60)} min`;
  if (x < 86400) {
    const minutes = Math.round((x % 3600) / 60);
    return `${Math.floor(x / 3600)} h${minutes && minutes < 60 ? ` ${minutes} min` : ""}`;
  }
  return `${Math.round(x / 86400)} d`;
}

export function ago(x) {
  if (!known(x)) return UNKNOWN;
  if (x < 1.5) return "now";
  return x < 60 ? `${Math.round(x)} s` : seconds(x);
}

export function clock(unix) {
  return known(unix) ? new Date(unix * 1000).toLocaleTimeString("en-GB") : UNKNOWN;
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

function trimmed(x) {
  return x >= 10 ? x.toFixed(0) : x.toFixed(1).replace(/\.0$/, "");
}

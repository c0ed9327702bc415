// Small marks: a tier, a state, a client, where a prompt's KV came from. One colour for each tier.

import { html } from "./html.js";
import { placeOf, serverTime, tick, TIER_NAMES } from "../live/store.js";
import { ago } from "../live/format.js";

const SOURCE_TIER = { hot: "hot", "cold-ram": "ram", "cold-disk": "disk", "cold-redis": "redis" };
const SOURCE_WORDS = {
  hot: "hot",
  "cold-ram": "from RAM",
  "cold-disk": "from disk",
  "cold-redis": "from Redis",
  miss: "missed",
};
// Why a turn had to compute what it might have reused; the server's words in short ones of ours.
export const REASONS = {
  "never-stored": "nothing of it was stored here",
  "too-short": "it was shorter than the least that is stored",
  "computed-sooner": "computing was faster than unpacking",
  diverged: "the prompt changed",
  evicted: "its tier ran out of room",
  ttl: "kept for too long",
  fingerprint: "saved by another model or layout",
  corrupt: "damaged, so not used",
  deadline: "a slow tier: computing was faster",
  unavailable: "its tier was down",
  disabled: "this engine does not hibernate",
  "foreign-secret": "unknown here; the data on this Redis is of another secret",
  "foreign-seed": "the data on this Redis is of another PYTHONHASHSEED",
};
// Why a conversation's KV left the place where it was.
export const LEFT = {
  idle: "quiet for long enough",
  pressure: "hot memory was over its mark",
  memory: "the machine ran short of memory",
  asked: "on request",
  engine: "the engine needed the room",
  budget: "the tier ran out of room",
  share: "its tenant's share was used up",
  limit: "its tenant may hold no more",
  expired: "not used in time",
  forgotten: "forgotten",
  missing: "the engine no longer knew it",
  "no-copy": "there was no packed copy",
};
export const leftWords = (why) => LEFT[why] ?? why;
const CLIENTS = {
  "claude-code": "Claude Code",
  codex: "Codex",
  opencode: "OpenCode",
  cline: "Cline",
  "qwen-code": "Qwen Code",
  "open-webui": "Open WebUI",
  "openai-sdk": "OpenAI SDK",
  "anthropic-sdk": "Anthropic SDK",
  "ai-sdk": "AI SDK",
  langchain: "LangChain",
  litellm: "LiteLLM",
  thermocline: "thermocline",
  python: "Python",
  node: "Node.js",
};

// *Missed* is said of returns that found nothing to reuse. A first turn has nothing to return to,
// though it may begin as other sessions do. (Headers call one that shares nothing a miss.)
export const isFirst = (source, reason) => source === "first" || (source === "miss" && reason === "never-stored");

export const tierOf = (source) => SOURCE_TIER[source] ?? "none";
export const sourceWords = (source) => SOURCE_WORDS[source] ?? "";
export const clientName = (name) => CLIENTS[name] ?? name;

export function Tier({ name }) {
  return html`<span class="mark ${name || "none"}">${TIER_NAMES[name] ?? "nowhere yet"}</span>`;
}

// A state as a reader thinks of it: what goes on, then where the KV is.
export function Whereabouts({ row }) {
  const place = placeOf(row);
  const doing = { active: "answering", waking: "waking", saving: "being saved", hibernating: "falling asleep", away: "engine away" }[row.state];
  return html`<span class="mark ${place || "none"} ${doing ? "busy" : ""}"
    >${doing ?? TIER_NAMES[place] ?? "nowhere yet"}</span
  >`;
}

export function Client({ name }) {
  return name ? html`<span class="client">${clientName(name)}</span>` : html`<span class="faint">–</span>`;
}

export function Source({ source, reason }) {
  if (!source) return html`<span class="faint">–</span>`;
  if (isFirst(source, reason)) return html`<span class="faint">first turn</span>`;
  const why = reason ? (REASONS[reason] ?? reason) : "";
  return html`<span class="source" title=${why}
    ><span class="mark ${tierOf(source)}">${sourceWords(source)}</span>${reason &&
    html` <span class="reason">${reason}</span>`}</span
  >`;
}

// Times that go on: read from the shared clock, so that only these words are drawn again.
export function Since({ at }) {
  return html`${at ? ago(Math.max(0, tick.value - at)) : "–"}`;
}

export const since = (at) => (at ? Math.max(0, serverTime() - at) : null);

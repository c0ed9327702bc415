// The lines that clients need to talk to this server; ``thermocline connect`` writes them itself.

import { keyOf } from "../live/api.js";
import { server } from "../live/store.js";

// What stands in the lines for the reader's key; copied, they have the key itself.
export const KEY = "YOUR-KEY";
export const CLIENT_NAMES = [
  "Claude Code", "Codex", "OpenCode", "Open WebUI", "LibreChat", "Continue", "Zed", "VS Code", "n8n", "Home Assistant",
  "OpenAI SDK", "curl",
];

// What clients have to know of this server.
export function thisServer() {
  const it = server.value;
  return {
    url: new URL(".", location.href).href.replace(/\/$/, ""),
    model: it?.model ?? "MODEL",
    context: it?.max_context ?? 32768,
    key: keyOf() ? KEY : "none",
  };
}

export function linesFor(name, { url, model, context, key }) {
  const quoted = (x) => `'${String(x).replaceAll("'", "'\\''")}'`;
  const exports = (values) => Object.entries(values).map(([k, v]) => `export ${k}=${quoted(v)}`).join("\n");
  const output = Math.max(1024, Math.floor(context / 4));
  const entered = `${url}/v1\nAPI Key:         ${key}\nModel:           ${model}\nContext:         ${context}`;
  switch (name) {
    case "Claude Code":
      return exports({
        ANTHROPIC_BASE_URL: url,
        ANTHROPIC_AUTH_TOKEN: key,
        ANTHROPIC_MODEL: model,
        ANTHROPIC_DEFAULT_OPUS_MODEL: model,
        ANTHROPIC_DEFAULT_SONNET_MODEL: model,
        ANTHROPIC_DEFAULT_HAIKU_MODEL: model,
        API_TIMEOUT_MS: "3000000",
        CLAUDE_CODE_ATTRIBUTION_HEADER: "0",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS: String(output),
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
      });
    case "Codex":
      return `# ~/.codex/config.toml
model = ${JSON.stringify(model)}
model_provider = "thermocline"
model_context_window = ${context}

[model_providers.thermocline]
name = "Thermocline"
base_url = "${url}/v1"
wire_api = "responses"
env_key = "THERMOCLINE_API_KEY"
stream_idle_timeout_ms = 3000000
${exports({ THERMOCLINE_API_KEY: key })}`;
    case "OpenCode":
      return `// ~/.config/opencode/opencode.json
${JSON.stringify(
  {
    $schema: "https://opencode.ai/config.json",
    model: `thermocline/${model}`,
    provider: {
      thermocline: {
        npm: "@ai-sdk/openai-compatible",
        name: "Thermocline",
        options: { baseURL: `${url}/v1`, apiKey: key, timeout: false },
        models: { [model]: { name: model, limit: { context, output } } },
      },
    },
  },
  null,
  2,
)}`;
    case "Open WebUI":
      return exports({
        OPENAI_API_BASE_URL: `${url}/v1`,
        OPENAI_API_KEY: key,
        DEFAULT_MODELS: model,
        ENABLE_FORWARD_USER_INFO_HEADERS: "true",
      });
    case "LibreChat":
      return `# librechat.yaml
endpoints:
  custom:
    - name: "Thermocline"
      baseURL: "${url}/v1"
      apiKey: "${key}"
      models:
        default: [${JSON.stringify(model)}]
      titleConvo: true
      titleModel: ${JSON.stringify(model)}
      headers:
        X-Session-ID: "{{LIBRECHAT_BODY_CONVERSATIONID}}"`;
    case "Continue":
      return `# ~/.continue/config.yaml
name: Thermocline
version: 0.0.1
schema: v1
models:
  - name: ${JSON.stringify(model)}
    provider: openai
    model: ${JSON.stringify(model)}
    apiBase: "${url}/v1"
    apiKey: "${key}"
    roles: [chat, edit, apply]
    defaultCompletionOptions:
      contextLength: ${context}`;
    case "Zed":
      return `// ~/.config/zed/settings.json
${JSON.stringify(
  {
    language_models: {
      openai_compatible: {
        Thermocline: {
          api_url: `${url}/v1`,
          available_models: [{ name: model, display_name: model, max_tokens: context, max_output_tokens: output }],
        },
      },
    },
  },
  null,
  2,
)}
${exports({ THERMOCLINE_API_KEY: key })}`;
    case "VS Code":
      return `Command:         Chat: Manage Language Models, then Add Models, OpenAI Compatible
Group Name:      Thermocline
URL:             ${entered}`;
    case "n8n":
      return `Credential:      OpenAI
Base URL:        ${entered}`;
    case "Home Assistant":
      return `Integration:     Extended OpenAI Conversation (HACS)
Base URL:        ${entered}`;
    case "OpenAI SDK":
      return `from openai import OpenAI

client = OpenAI(base_url="${url}/v1", api_key="${key}")
client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=[{"role": "user", "content": "Hello"}],
    extra_headers={"X-Session-ID": "me"},  # or none: a chat is known by its messages
)`;
    default:
      return `curl ${url}/v1/chat/completions -H 'content-type: application/json' \\
  ${key === KEY ? `-H 'authorization: Bearer ${key}' ` : ""}-H 'X-Session-ID: me' \\
  -d ${quoted(`{"model": ${JSON.stringify(model)}, "messages": [{"role": "user", "content": "Hello"}]}`)}`;
  }
}

// Asks a server through JavaScript clients; prints "name<TAB>version<TAB>ok" or what went wrong.
// Started by sdks.py in the folder where the packages are, with the server's URL and model.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, model, folder] = process.argv.slice(2);
const require = createRequire(pathToFileURL(folder + "/"));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const versionOf = (name) =>
  JSON.parse(readFileSync(`${folder}/node_modules/${name}/package.json`, "utf8")).version;
const say = (name, version, result) => console.log(`${name}\t${version}\t${result}`);

async function check(name, packageName, work) {
  try {
    await work();
    say(name, versionOf(packageName), "ok");
  } catch (error) {
    say(name, versionOf(packageName), String(error?.message ?? error).slice(0, 300).replace(/\s+/g, " "));
  }
}
const must = (fact, words) => {
  if (!fact) throw new Error(words);
};
const ask = "hello big world";
const tool = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

const { default: OpenAI } = await load("openai");
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: ask }];
await check("openai-node, chat", "openai", async () => {
  const said = await openai.chat.completions.create({ model, messages, max_tokens: 16 });
  must(said.usage.total_tokens > 0, "no usage");
});
await check("openai-node, chat stream", "openai", async () => {
  const runner = openai.chat.completions.stream({ model, messages, max_tokens: 16 });
  must((await runner.finalChatCompletion()).choices.length === 1, "no choice");
});
await check("openai-node, responses stream, two turns", "openai", async () => {
  const first = await openai.responses.create({ model, input: ask, max_output_tokens: 32 });
  const stream = openai.responses.stream({
    model, input: "and again", previous_response_id: first.id, max_output_tokens: 32,
  });
  const second = await stream.finalResponse();
  must(second.usage.input_tokens_details.cached_tokens > 0, "nothing was reused");
});
await check("openai-node, models", "openai", async () => {
  must((await openai.models.list()).data.length > 0, "no model");
});

const ai = await load("ai");
const vercel = {
  "@ai-sdk/openai": async () => (await load("@ai-sdk/openai")).createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }),
  "@ai-sdk/openai-compatible": async () =>
    (await load("@ai-sdk/openai-compatible")).createOpenAICompatible({
      name: "thermocline", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true,
    }),
  "@ai-sdk/anthropic": async () =>
    (await load("@ai-sdk/anthropic")).createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" }),
};
for (const [name, make] of Object.entries(vercel)) {
  const provider = await make();
  await check(`Vercel ai, ${name}, generateText`, name, async () => {
    const said = await ai.generateText({ model: provider(model), prompt: ask, maxOutputTokens: 32, maxRetries: 0 });
    must(said.usage.inputTokens > 0, "no usage");
  });
  await check(`Vercel ai, ${name}, streamText with a tool`, name, async () => {
    let failed;
    const result = ai.streamText({
      model: provider(model), prompt: ask, maxOutputTokens: 32, maxRetries: 0,
      tools: { weather: ai.tool({ description: "weather", inputSchema: ai.jsonSchema(tool) }) },
      onError: ({ error }) => (failed = error),
    });
    await result.consumeStream();
    if (failed) throw failed;
    must((await result.finishReason) !== "error", "it ended with an error");
  });
}

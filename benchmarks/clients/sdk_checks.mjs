// Two turns of a conversation through each JavaScript client; prints a line for each, with tabs:
// name, version, "ok" or the error, tokens of the second prompt, and how many of them were reused.
// sdks.py runs it in the folder of the packages, with the server's URL, its model, that folder and
// the two questions.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, model, folder, ask, more] = process.argv.slice(2);
const require = createRequire(pathToFileURL(folder + "/"));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const versionOf = (name) =>
  JSON.parse(readFileSync(`${folder}/node_modules/${name}/package.json`, "utf8")).version;

async function check(name, packageName, work) {
  let [result, prompt, cached] = ["ok", "", ""];
  try {
    [prompt, cached] = await work();
  } catch (error) {
    result = String(error?.message ?? error).slice(0, 300).replace(/\s+/g, " ");
  }
  console.log([name, versionOf(packageName), result, prompt, cached].join("\t"));
}
const must = (fact, words) => {
  if (!fact) throw new Error(words);
};

const { default: OpenAI } = await load("openai");
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: ask }];
await check("openai-node, chat, the second turn streamed", "openai", async () => {
  const first = await openai.chat.completions.create({ model, messages, max_tokens: 32 });
  const runner = openai.chat.completions.stream({
    model, messages: [...messages, first.choices[0].message, { role: "user", content: more }],
    max_tokens: 32, stream_options: { include_usage: true },
  });
  const { usage } = await runner.finalChatCompletion();
  return [usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens];
});
await check("openai-node, responses by previous_response_id, streamed", "openai", async () => {
  const first = await openai.responses.create({ model, input: ask, max_output_tokens: 32 });
  const stream = openai.responses.stream({
    model, input: more, previous_response_id: first.id, max_output_tokens: 32,
  });
  const { usage } = await stream.finalResponse();
  return [usage.input_tokens, usage.input_tokens_details.cached_tokens];
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
const city = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const tools = { weather: ai.tool({ description: "weather", inputSchema: ai.jsonSchema(city) }) };
// The second turn sends the messages that the SDK returned for the first one. For Responses these
// have an item_reference, since the SDK assumes that the answer is stored.
for (const [name, make] of Object.entries(vercel)) {
  const provider = await make();
  const settings = { model: provider(model), maxOutputTokens: 32, maxRetries: 0 };
  const second = (first) => [
    ...messages, ...first.response.messages, { role: "user", content: more },
  ];
  const reuse = (usage) => [usage.inputTokens, usage.inputTokenDetails.cacheReadTokens ?? 0];
  await check(`Vercel ai, ${name}, generateText`, name, async () => {
    const first = await ai.generateText({ ...settings, messages });
    return reuse((await ai.generateText({ ...settings, messages: second(first) })).usage);
  });
  await check(`Vercel ai, ${name}, streamText with a tool`, name, async () => {
    const first = await ai.generateText({ ...settings, messages, tools, toolChoice: "none" });
    let failed;
    const result = ai.streamText({
      ...settings, messages: second(first), tools, toolChoice: "none",
      onError: ({ error }) => (failed = error),
    });
    await result.consumeStream();
    if (failed) throw failed;
    must((await result.finishReason) !== "error", "it ended with an error");
    return reuse(await result.usage);
  });
}

// Vercel's AI SDK, against the server at the address that is the first argument.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const URL = process.argv[2];
const name = "kvcommons-demo";
const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "kvcommons", baseURL: `${URL}/v1`, includeUsage: true, supportsStructuredOutputs: true,
});
const models = { chat: openai.chat(name), responses: openai.responses(name), compatible: compatible(name) };
const Pet = z.object({ name: z.string().max(12), kind: z.enum(["cat", "dog"]) });
const settings = { temperature: 0, maxRetries: 0 };

const checks = {
  async chat(model) {
    const { text, usage } = await generateText({
      model, ...settings, prompt: "My cat is called Zuzu. What is my cat called?",
    });
    assert.match(text, /Zuzu/);
    assert.ok(usage.outputTokens > 0);
  },

  async stream(model) {
    const result = streamText({ model, ...settings, prompt: "My dog is called Rexo. What is my dog called?" });
    let text = "";
    for await (const delta of result.textStream) text += delta;
    assert.match(text, /Rexo/);
    assert.ok((await result.usage).outputTokens > 0);
  },

  async history(model) {
    const messages = [{ role: "user", content: "My hamster is called Fipsi, and it lives with my sister." }];
    const told = await generateText({ model, ...settings, messages });
    messages.push(...told.response.messages, { role: "user", content: "What is my hamster called?" });
    const { text, usage } = await generateText({ model, ...settings, messages });
    assert.match(text, /Fipsi/);
    assert.ok(usage.cachedInputTokens > 0, JSON.stringify(usage));
  },

  async tools(model) {
    const kinds = [];
    const remember_pet = tool({
      description: "Remembers that somebody has such a pet.",
      inputSchema: z.object({ kind: z.enum(["cat", "dog"]) }),
      execute: ({ kind }) => (kinds.push(kind), `A ${kind} is remembered.`),
    });
    const { steps } = await generateText({
      model, ...settings, tools: { remember_pet }, prompt: "My cat is called Zuzu.", maxOutputTokens: 200,
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : { type: "tool", toolName: "remember_pet" } }),
    });
    assert.equal(steps.length, 2);
    assert.match(kinds[0], /^(cat|dog)$/);
  },

  async structured(model) {
    const { object } = await generateObject({ model, ...settings, schema: Pet, prompt: "My cat is called Zuzu." });
    assert.match(object.kind, /^(cat|dog)$/);
    const streamed = streamObject({ model, ...settings, schema: Pet, prompt: "My cat is called Zuzu." });
    for await (const _ of streamed.partialObjectStream);
    assert.deepEqual(await streamed.object, object);
  },

  async error(model) {
    await assert.rejects(generateText({ model, ...settings, maxOutputTokens: 100_000, prompt: "hi" }), (error) => {
      assert.ok(APICallError.isInstance(error), error);
      assert.equal(error.statusCode, 400);
      assert.match(error.message, /maximum context length/);
      assert.equal(error.isRetryable, false);
      return true;
    });
  },
};

for (const [kind, model] of Object.entries(models)) {
  for (const [check, run] of Object.entries(checks)) {
    await run(model);
    console.log(`${kind}: ${check}`);
  }
}

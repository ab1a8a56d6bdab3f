// OpenAI's Node SDK, against the server at the address that is the first argument.
import assert from "node:assert/strict";
import OpenAI, { BadRequestError, ConflictError, NotFoundError } from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const URL = process.argv[2];
const model = "kvcommons-demo";
const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const user = (content) => ({ role: "user", content });
const Pet = z.object({ name: z.string().max(12), kind: z.enum(["cat", "dog"]) });
const parameters = {
  type: "object",
  properties: { kind: { enum: ["cat", "dog"] } },
  required: ["kind"],
  additionalProperties: false,
};

const checks = {
  async chat() {
    const answer = await client.chat.completions.create({
      model, temperature: 0, messages: [user("My cat is called Zuzu. What is my cat called?")],
    });
    assert.match(answer.choices[0].message.content, /Zuzu/);
    assert.ok(answer.usage.prompt_tokens_details.cached_tokens >= 0);
  },

  async stream() {
    const stream = client.chat.completions.stream({
      model, temperature: 0, stream_options: { include_usage: true },
      messages: [user("My dog is called Rexo. What is my dog called?")],
    });
    let text = "";
    stream.on("content", (delta) => (text += delta));
    const whole = await stream.finalChatCompletion();
    assert.match(text, /Rexo/);
    assert.equal(whole.choices[0].message.content, text);
    assert.ok((await stream.totalUsage()).completion_tokens > 0);
  },

  async session() {
    const headers = { "X-Session-ID": "openai-node-client" };
    const ask = (text) =>
      client.chat.completions.create({ model, temperature: 0, messages: [user(text)] }, { headers });
    await ask("My goose is called Gerda.");
    const answer = await ask("What is my goose called?");
    assert.match(answer.choices[0].message.content, /Gerda/);
    assert.ok(answer.usage.prompt_tokens_details.cached_tokens > 0);
    assert.equal(answer.session_id, "openai-node-client");
  },

  async tools() {
    const tools = [{ type: "function", function: { name: "remember_pet", parameters } }];
    const asked = [user("My cat is called Zuzu.")];
    const forced = { model, temperature: 0, tools, tool_choice: "required", parallel_tool_calls: false };
    const answer = await client.chat.completions.create({ ...forced, messages: asked });
    const [call] = answer.choices[0].message.tool_calls;
    assert.match(JSON.parse(call.function.arguments).kind, /^(cat|dog)$/);
    const result = { role: "tool", tool_call_id: call.id, content: "It is remembered." };
    const after = await client.chat.completions.create({
      model, temperature: 0, tools, messages: [...asked, answer.choices[0].message, result], max_tokens: 60,
    });
    assert.ok(after.choices[0].message.content || after.choices[0].message.tool_calls);
    const streamed = await client.chat.completions.stream({ ...forced, messages: asked }).finalChatCompletion();
    assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
    let kind = "";
    const remember = ({ kind: given }) => ((kind = given), "It is remembered.");
    const runner = client.chat.completions.runTools({
      model, temperature: 0, max_tokens: 200, messages: asked,
      tool_choice: { type: "function", function: { name: "remember_pet" } },
      tools: [{ type: "function", function: { name: "remember_pet", parameters, parse: JSON.parse, function: remember } }],
    });
    await runner.done();
    assert.match(kind, /^(cat|dog)$/);
  },

  async structured() {
    const answer = await client.chat.completions.parse({
      model, temperature: 0, messages: [user("My cat is called Zuzu.")], response_format: zodResponseFormat(Pet, "pet"),
    });
    assert.match(answer.choices[0].message.parsed.kind, /^(cat|dog)$/);
    const response = await client.responses.parse({
      model, temperature: 0, input: "My cat is called Zuzu.", text: { format: zodTextFormat(Pet, "pet") },
    });
    assert.match(response.output_parsed.kind, /^(cat|dog)$/);
  },

  async responses() {
    const told = await client.responses.create({ model, temperature: 0, input: "My swan is called Sanna." });
    const asked = await client.responses.create({
      model, temperature: 0, input: "What is my swan called?", previous_response_id: told.id,
    });
    assert.match(asked.output_text, /Sanna/);
    const stream = client.responses.stream({ model, temperature: 0, input: "My owl is called Otto. What is my owl called?" });
    let text = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal((await stream.finalResponse()).output[0].content[0].text, text);
  },

  async error() {
    const refused = (body) => client.chat.completions.create({ model, messages: [user("hi")], ...body });
    await assert.rejects(refused({ max_tokens: 100_000 }), (error) => {
      assert.ok(error instanceof BadRequestError);
      assert.equal(error.code, "context_length_exceeded");
      return true;
    });
    await assert.rejects(refused({ model: "none" }), NotFoundError);
    const session_id = "openai-node-busy";
    const both = [1, 2].map((n) => refused({ session_id, messages: [user(`count to ${n}`)] }));
    const failed = (await Promise.allSettled(both)).filter((one) => one.status === "rejected");
    for (const { reason } of failed) assert.ok(reason instanceof ConflictError);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(name);
}

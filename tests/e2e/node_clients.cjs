// OpenAI's and Anthropic's packages for Node against a server that repeats what the user said, or one with a real model,
// where calls are asked for and not put into its mouth. Prints one JSON object.
const { default: OpenAI } = require("openai");
const { default: Anthropic } = require("@anthropic-ai/sdk");

const [url, key, call, model = "parrot"] = process.argv.slice(2);
const real = model !== "parrot";
const brief = { temperature: 0, max_tokens: real ? 12 : 99 };
// Closed: a small model may go on with properties of its own until its tokens end.
const closed = real ? { required: ["city"], additionalProperties: false } : {};
const parameters = { type: "object", properties: { city: { type: "string" } }, ...closed };

async function openai() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
  const messages = [{ role: "user", content: "Hello there, parrot!" }];
  const whole = await client.chat.completions.create({ model, messages, ...brief });
  let streamed = "";
  const stream = await client.chat.completions.create({ model, messages, ...brief, stream: true });
  for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
  const tools = [{ type: "function", function: { name: "weather", parameters } }];
  const asked = { model, messages: [{ role: "user", content: call }], tools, max_tokens: 99, temperature: 0 };
  if (real) Object.assign(asked, { tool_choice: "required", parallel_tool_calls: false });
  const called = await client.chat.completions.create(asked);
  let argumentsText = "";
  const calls = await client.chat.completions.create({ ...asked, stream: true });
  for await (const chunk of calls) argumentsText += chunk.choices[0]?.delta?.tool_calls?.[0]?.function?.arguments ?? "";
  const alike = { temperature: 0, max_output_tokens: brief.max_tokens };
  const response = await client.responses.create({ model, input: "Hello there, parrot!", ...alike });
  const refused = await client.chat.completions.create({ model: "nobody", messages }).catch((error) => error.status);
  return {
    whole: whole.choices[0].message.content, streamed, response: response.output_text, refused,
    called: called.choices[0].message.tool_calls[0].function.arguments, argumentsText,
  };
}

async function anthropic() {
  const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
  const messages = [{ role: "user", content: "Hello there, parrot!" }];
  const whole = await client.messages.create({ model, ...brief, messages });
  const stream = client.messages.stream({ model, ...brief, messages });
  let streamed = "";
  stream.on("text", (text) => (streamed += text));
  const last = await stream.finalMessage();
  const tools = [{ name: "weather", input_schema: parameters }];
  const asked = { model, max_tokens: 99, temperature: 0, messages: [{ role: "user", content: call }], tools };
  if (real) asked.tool_choice = { type: "any", disable_parallel_tool_use: true };
  const called = await client.messages.stream(asked).finalMessage();
  const refused = await client.messages.create({ model: "nobody", max_tokens: 1, messages }).catch((error) => error.status);
  return {
    whole: whole.content[0].text, streamed, stop: last.stop_reason, refused,
    called: called.content.find((block) => block.type === "tool_use").input, reason: called.stop_reason,
  };
}

(async () => console.log(JSON.stringify({ openai: await openai(), anthropic: await anthropic() })))();

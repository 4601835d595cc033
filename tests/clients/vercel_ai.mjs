// Vercel's `ai` with a calculator, by its own loop of tool calls, over chat completions, responses or messages.
//
// `node vercel_ai.mjs BASE_URL KEY [--stream] [--responses | --messages]` prints one JSON line.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, apiKey, ...flags] = process.argv.slice(2);
const QUESTIONS = ["What is 12*13?", "And 7*8, and 9*11?", "Thank you 🙂"];
const results = [];
const answers = [];
const messages = [];

function chosenModel() {
  if (flags.includes("--messages")) return createAnthropic({ baseURL, apiKey })("scripted");
  const openai = createOpenAI({ baseURL, apiKey });
  return flags.includes("--responses") ? openai("scripted") : openai.chat("scripted");
}

const calculator = tool({
  description: "Evaluates an arithmetic expression.",
  inputSchema: z.object({ expression: z.string() }),
  execute: async ({ expression }) => {
    const [left, right] = expression.split("*");
    results.push(String(Number(left) * Number(right)));
    return results.at(-1);
  },
});

for (const question of QUESTIONS) {
  messages.push({ role: "user", content: question });
  const asked = {
    model: chosenModel(),
    system: "Use the calculator.",
    messages,
    tools: { calculator },
    stopWhen: stepCountIs(5),
    maxRetries: 0,
  };
  if (flags.includes("--stream")) {
    const stream = streamText(asked);
    await stream.consumeStream();
    answers.push(await stream.text);
    messages.push(...(await stream.responseMessages));
  } else {
    const answer = await generateText(asked);
    answers.push(answer.text);
    messages.push(...answer.responseMessages);
  }
}
console.log(JSON.stringify({ answers, results }));

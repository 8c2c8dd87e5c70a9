import { readFileSync, writeFileSync } from 'node:fs';
import { ToolLoopAgent, tool } from 'ai';
import { z } from 'zod';
import * as office from './office.mjs';
import { model } from './vercel_model.mjs';

const FILE = 'conversation.json';

const findAddress = tool({
  description: "Find a person's mail address.",
  inputSchema: z.object({ name: z.string() }),
  execute: ({ name }) => office.lookUp(name),
});

const sendMail = tool({
  description: 'Send a mail.',
  inputSchema: z.object({ to: z.string(), text: z.string() }),
  execute: ({ to, text }) => office.deliver(to, text),
});

const agent = new ToolLoopAgent({
  model,
  tools: { findAddress, sendMail },
  toolApproval: { sendMail: 'user-approval' },
});

export async function ask() {
  const messages = [{ role: 'user', content: 'Tell Ada that the build is green' }];
  const result = await agent.generate({ messages });
  writeFileSync(FILE, JSON.stringify([...messages, ...result.responseMessages]));
  for (const part of result.content)
    if (part.type === 'tool-approval-request') console.log('waiting:', part.toolCall.toolName, part.toolCall.input);
}

export async function approve() {
  const messages = JSON.parse(readFileSync(FILE, 'utf8'));
  const requests = messages.at(-1).content.filter((part) => part.type === 'tool-approval-request');
  const responses = requests.map(({ approvalId }) => ({ type: 'tool-approval-response', approvalId, approved: true }));
  messages.push({ role: 'tool', content: responses });
  const result = await agent.generate({ messages });
  writeFileSync(FILE, JSON.stringify([...messages, ...result.responseMessages]));
  console.log(result.text);
}

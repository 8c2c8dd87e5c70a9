// A model that follows a script, in place of a real one: its next reply depends on the tool results so far.
import { MockLanguageModelV4 } from 'ai/test';

const call = (toolName, input) => ({
  type: 'tool-call',
  toolCallId: `call-${toolName}`,
  toolName,
  input: JSON.stringify(input),
});
const REPLIES = [
  call('findAddress', { name: 'Ada' }),
  call('sendMail', { to: 'ada@example.org', text: 'The build is green.' }),
  { type: 'text', text: 'Ada has been told.' },
];
const results = (message) => (message.role === 'tool' ? message.content : []).filter((part) => part.type === 'tool-result');

export const model = new MockLanguageModelV4({
  doGenerate: async ({ prompt }) => {
    const reply = REPLIES[prompt.flatMap(results).length];
    const finish = reply.type === 'text' ? 'stop' : 'tool-calls';
    return {
      content: [reply],
      finishReason: { unified: finish, raw: finish },
      usage: { inputTokens: { total: 1 }, outputTokens: { total: 1 } },
      warnings: [],
    };
  },
});

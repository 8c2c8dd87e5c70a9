// The outside world of the program: an address book, and an outbox that tests can count.
// OFFICE_DIES=1 kills the process after a mail has gone out, before the program hears of it.
import { appendFileSync } from 'node:fs';

export const lookUp = (name) => `${name.toLowerCase()}@example.org`;

export function deliver(to, text) {
  appendFileSync('outbox.txt', `${to}: ${text}\n`);
  if (process.env.OFFICE_DIES) process.kill(process.pid, 'SIGKILL');
  return `sent to ${to}`;
}

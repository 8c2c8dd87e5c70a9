// Which pending calls fit into a table, and the totals of its columns.
import { isObject, brief } from "./text.js";
import { plainPreview } from "./elements/values.js";
import { several } from "./elements/votes.js";

const LONGEST = 120; // characters of a value in a table
const MOST = 9; // columns of a table
const NOT_A_QUANTITY = /(^|_)(id|ids|no|nr|number|order|account|invoice|customer|booking|code|year|zip|phone|iban)$/i;

const isShort = (value) => value === null || (typeof value !== "object" && !String(value).includes("\n") && String(value).length <= LONGEST);
const isFlat = (object) => isObject(object) && Object.values(object).every(isShort);

/** Return the plan of a call as columns: {} without one beyond the arguments, undefined if it needs more room. */
function planOf(entry) {
  if (plainPreview(entry)) return {};
  return isFlat(entry.preview) ? entry.preview : isShort(entry.preview) && entry.preview !== null ? { plan: entry.preview } : undefined;
}

// Whatever a card would warn of needs the whole card.
const isPlain = (entry) => isFlat(entry.args) && planOf(entry) && !several(entry) &&
  !["recovery", "reason", "continues", "preview_error"].some((name) => entry[name]) && !entry.approver_roles?.length && !entry.not_requester && entry.executor !== "client";

/** Split calls into tables, {tool, entries, args, plan} (names of columns), and the calls that are shown in full. */
export function tablesOf(all) {
  const tables = [], full = [];
  for (const [tool, entries] of Map.groupBy ? Map.groupBy(all, ({ tool }) => tool) : grouped(all)) {
    const plain = entries.filter(isPlain);
    const names = (objects) => [...new Set(objects.flatMap(Object.keys))];
    const args = names(plain.map((entry) => entry.args)), plan = names(plain.map(planOf));
    const fits = plain.length > 1 && args.length + plan.length <= MOST;
    if (fits) tables.push({ tool, entries: plain, args, plan });
    full.push(...(fits ? entries.filter((entry) => !plain.includes(entry)) : entries));
  }
  return { tables, full };
}

function grouped(all) {
  const groups = new Map();
  for (const entry of all) groups.set(entry.tool, [...(groups.get(entry.tool) ?? []), entry]);
  return groups;
}

export const planCell = (entry, name) => planOf(entry)[name];

/** Return the sums of the numeric arguments that all entries have, as texts: "amount 312.40 EUR + 20 USD".
 *
 * With an argument for the currency there is one sum per currency. Numbers that identify something are not added.
 */
export function totals({ entries, args }) {
  const currency = args.find((name) => /currency/i.test(name) && entries.every((entry) => typeof entry.args[name] === "string"));
  return args.filter((name) => !NOT_A_QUANTITY.test(name) && entries.every((entry) => ["number", "bigint"].includes(typeof entry.args[name]))).flatMap((name) => {
    const sums = new Map();
    for (const { args: given } of entries) sums.set(given[currency], [...(sums.get(given[currency]) ?? []), given[name]]);
    const words = [...sums].map(([unit, numbers]) => [sum(numbers), unit]);
    return words.some(([total]) => total === null) ? [] : `${name} ${words.map((pair) => pair.filter((part) => part !== undefined).join(" ")).join(" + ")}`;
  });
}

/** Return the exact sum of decimal numbers as text, or null if one is not written as a plain decimal. */
export function sum(numbers) {
  const parts = numbers.map((number) => /^(-?)(\d+)(?:\.(\d+))?$/.exec(brief(number)));
  if (parts.includes(null)) return null;
  const places = Math.max(...parts.map(([, , , fraction = ""]) => fraction.length), 0);
  const total = parts.reduce((all, [, sign, whole, fraction = ""]) => all + BigInt(sign + whole + fraction.padEnd(places, "0")), 0n);
  const digits = String(total).replace("-", "").padStart(places + 1, "0");
  const fraction = digits.slice(digits.length - places).padEnd(places && 2, "0");
  return `${total < 0n ? "-" : ""}${digits.slice(0, digits.length - places)}${places ? `.${fraction}` : ""}`;
}

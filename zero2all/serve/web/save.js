// Taking text away: to the clipboard, or as a file.

import { announce, h } from './dom.js';
import { allSettings } from './state.js';
import { said } from './store.js';
import { t } from './words.js';

export async function copy(text) {
	try {
		await navigator.clipboard.writeText(text);
		announce(t('copied'));
	} catch {
		announce(copyOldWay(text) ? t('copied') : t('notCopied'));
	}
}

// Browsers give pages the clipboard only over https or on this machine.
function copyOldWay(text) {
	const area = h('textarea', { value: text, class: 'off-screen' });
	document.body.append(area);
	area.select();
	const isDone = document.execCommand('copy');
	area.remove();
	return isDone;
}

function saveFile(name, type, text) {
	const url = URL.createObjectURL(new Blob([text], { type }));
	const link = h('a', { href: url, download: name });
	document.body.append(link);
	link.click();
	link.remove();
	setTimeout(() => URL.revokeObjectURL(url), 10000);
}

const stamp = () => new Date().toISOString().slice(0, 19).replaceAll(':', '-');
const named = ({ text, bytes, logprob }) => ({ token: text, bytes, logprob });
const tokensOf = ({ clusters }) => clusters?.all.flatMap(({ tokens }) => tokens).map((token) => ({ ...named(token), top_logprobs: token.alternatives.map(named) }));

export const asCode = ({ function: { name, arguments: given } }) => `${name}(${given})`;

// `messages` of a chat; the last of them may know its tokens.
export function saveJson(model, messages) {
	const plain = messages.map(({ seed, finish, answer, ...message }) => ({ ...said(message), seed, finish_reason: finish, logprobs: answer && tokensOf(answer) }));
	saveFile(`chat-${stamp()}.json`, 'application/json', JSON.stringify({ model, settings: allSettings(), messages: plain }, null, '\t'));
}

export function saveMarkdown(model, messages) {
	const name = ({ role }) => ({ user: t('you'), tool: t('result') }[role] ?? model.id);
	saveFile(`chat-${stamp()}.md`, 'text/markdown', messages.map((each) => `**${name(each)}**\n\n${[each.content, ...(each.tool_calls ?? []).map(asCode)].filter(Boolean).join('\n\n')}\n`).join('\n'));
}

export const saveText = (text) => saveFile(`text-${stamp()}.md`, 'text/markdown', text);

export function saveTextJson(model, text, marks) {
	const written = marks.map(({ start, length, answer }) => ({ start, length, seed: answer?.seed, logprobs: answer && tokensOf(answer) }));
	saveFile(`text-${stamp()}.json`, 'application/json', JSON.stringify({ model, settings: allSettings(), text, written }, null, '\t'));
}

// Conversations kept in this browser, each by itself: two tabs do not overwrite each other's.

import { read, write } from './state.js';

const PREFIX = 'z2a-talk:';
const MOST = 200;

const keys = () => Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
const newest = (a, b) => b.time - a.time;

export const titleOf = ({ messages }) => messages.find(({ role }) => role === 'user')?.content.trim().split('\n')[0].slice(0, 80) ?? '';
export const all = () => keys().map(read).filter((each) => Array.isArray(each?.messages)).sort(newest);
export const load = (id) => read(PREFIX + id);
export const remove = (id) => localStorage.removeItem(PREFIX + id);
export const create = () => ({ id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`, time: Date.now(), messages: [], draft: '' });

// What is kept of a message: not its tokens, which are many times as large as its text.
export const said = ({ role, content, reasoning_content, tool_calls, tool_call_id }) => ({ role, content, reasoning_content, tool_calls, tool_call_id });
const plain = (message) => ({ ...said(message), seed: message.seed, finish: message.finish, dropped: message.dropped });

// Whether it could be kept; the oldest make room.
export function keep(conversation) {
	if (!conversation.messages.length && !conversation.draft) return true;
	const kept = { ...conversation, messages: conversation.messages.map(plain) };
	const others = all().filter(({ id }) => id !== conversation.id);
	for (const { id } of others.splice(MOST)) remove(id);
	while (!write(PREFIX + conversation.id, kept)) {
		if (!others.length) return false;
		remove(others.pop().id);
	}
	return true;
}

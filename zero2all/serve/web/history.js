// The list of conversations at the side.

import { button, byId, h } from './dom.js';
import * as store from './store.js';
import { t } from './words.js';

export function drawHistory(chat) {
	const root = byId('history');
	root.ariaLabel = t('history');
	const open = (conversation) => {
		chat.open(conversation);
		document.body.classList.remove('history-open');
		drawHistory(chat);
		chat.box.focus();
	};
	const remove = (id) => {
		store.remove(id);
		if (id === chat.conversation.id) chat.open(store.create());
		drawHistory(chat);
	};
	const items = store.all().map((each) => {
		const name = store.titleOf(each) || t('untitled');
		const isOpen = each.id === chat.conversation.id;
		return h('li', { class: isOpen ? 'on' : '' },
			h('button', { class: 'conversation', 'aria-current': isOpen ? 'true' : null, title: name, onclick: () => isOpen || open(store.load(each.id)) }, name),
			button('close', t('remove', { name }), () => remove(each.id)));
	});
	root.replaceChildren(
		h('h2', {}, t('history')),
		h('button', { class: 'plain', data: { tool: 'new' }, onclick: () => open(store.create()) }, t('newChat')),
		h('ul', { class: 'conversations' }, items),
		h('p', { class: 'hint' }, t('noHistory')));
}

// Configs: of one run all fields, of several the fields that differ.

import { h, later, scroll } from './dom.js';
import { get } from './server.js';
import { t } from './words.js';

const ROWS = 400;

export async function configTable(infos) {
	const replies = await Promise.all(infos.map((info) => get('config', { id: info.id }).catch(() => ({}))));
	if (!replies.some((reply) => reply.fields)) return h('p', { class: 'nothing' }, t('configNone'));
	const configs = replies.map((reply) => new Map(reply.fields));
	const fields = [...new Set(configs.flatMap((config) => [...config.keys()]))];
	const differ = fields.filter((field) => new Set(configs.map((config) => config.get(field))).size > 1);
	let isAll = infos.length === 1;
	let search = '';
	const body = h('tbody');
	const toggle = h('button', { class: 'plain', hidden: infos.length === 1, onclick: () => { isAll = !isAll; draw(); } });
	const draw = () => {
		const rows = (isAll ? fields : differ).filter((field) => field.toLowerCase().includes(search));
		body.replaceChildren(...rows.slice(0, ROWS).map((field) => h('tr', { class: differ.includes(field) && infos.length > 1 ? 'differs' : '' }, h('th', { scope: 'row' }, field), configs.map((config) => h('td', {}, config.get(field) ?? '–')))));
		if (!rows.length && !isAll) body.append(h('tr', {}, h('td', { colSpan: infos.length + 1 }, t('configSame'))));
		toggle.textContent = isAll ? t('configOnly', { count: differ.length }) : t('configAll', { count: fields.length });
	};
	draw();
	const find = h('input', { type: 'search', placeholder: t('configFind'), 'aria-label': t('configFind'), oninput: later((event) => { search = event.target.value.toLowerCase(); draw(); }, 100) });
	return h('div', { class: 'config' }, h('div', { class: 'row' }, find, toggle),
		scroll(t('config'), h('table', { class: 'grid' }, infos.length > 1 && h('thead', {}, h('tr', {}, h('td'), infos.map((info) => h('th', {}, info.name)))), body)));
}

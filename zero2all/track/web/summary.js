// What stands above the charts: how the chosen runs are doing, and what was left out of them.

import { color } from './chart.js';
import { h, scroll, span } from './dom.js';
import { age, count, duration, number, whole } from './format.js';
import { statePill } from './runs.js';
import { state } from './state.js';
import { t } from './words.js';

export function summary(infos) {
	const parts = [infos.length === 1 ? single(infos[0]) : table(infos)];
	for (const info of infos) {
		if (info.gone) parts.push(h('p', { class: 'notice bad' }, t('goneLong', { name: info.name })));
		else if (info.message && info.state !== 'running') parts.push(h('p', { class: `notice ${info.state === 'crashed' ? 'bad' : ''}` }, infos.length > 1 ? `${info.name}: ` : '', info.message));
		const what = leftOut(info);
		if (what) parts.push(h('details', { class: 'notice warn' }, h('summary', {}, `${infos.length > 1 ? `${info.name} · ` : ''}${t('left', { what })}`), h('ul', {}, Object.entries(info.problems).map(([problem, times]) => h('li', {}, `${problem}: ${whole(times)}`)))));
	}
	return h('div', { class: 'summary' }, parts.flat());
}

function leftOut(info) {
	if (info.skipped_lines) return t('lines', { count: whole(info.skipped_lines) });
	return Object.entries(info.problems ?? {}).map(([problem, times]) => `${problem} (${whole(times)})`).slice(0, 2).join(', ');
}

const ago = (time) => (time ? t('ago', { count: parseInt(time), unit: t(time.at(-1)) }) : t('now'));
const share = (info) => (info.total ? Math.min(1, (info.step ?? 0) / info.total) : null);

function single(info) {
	const done = share(info);
	const facts = [
		[t('step'), whole(info.step), info.total ? t('of', { total: whole(info.total) }) : ''],
		[t('trainLoss'), number(info.loss), t('nats')],
		[t('tokens'), count(info.tokens), ''],
		[t('speed'), count(info.speed), `${t('tokensPerSecond')}${info.state === 'running' ? '' : ` (${t('pointMean')})`}`],
		[t('time'), info.time ? duration(info.time - info.start) : '–', info.left === null ? '' : t('eta', { time: duration(info.left) })],
		[t('updated'), info.time ? ago(age(info.time)) : '–', info.attempt > 1 ? t('attempt', { number: info.attempt }) : (info.host ?? '')],
	];
	return h('div', { class: 'run-head' },
		h('div', { class: 'title' }, h('h1', {}, info.name), statePill(info.gone ? 'gone' : info.state)),
		h('dl', { class: 'facts' }, facts.map(([name, big, small]) => h('div', {}, h('dt', {}, name), h('dd', {}, big, small !== '' && h('small', {}, small))))),
		done !== null && h('div', { class: 'progress', role: 'progressbar', 'aria-label': t('progress'), 'aria-valuenow': Math.round(100 * done) }, h('i', { vars: { width: `${100 * done}%` } })));
}

function table(infos) {
	const head = [t('runs'), t('step'), t('tokens'), t('trainLoss'), t('speed'), t('time')];
	return [h('h1', {}, t('compared', { count: infos.length })), scroll(t('runs'), h('table', { class: 'grid compare' },
		h('thead', {}, h('tr', {}, h('td'), head.map((name) => h('th', {}, name)))),
		h('tbody', {}, infos.map((info) => h('tr', {},
			h('td', {}, h('i', { class: 'chip', vars: { background: color(state.runs.indexOf(info.id)) } })),
			h('td', {}, info.name, ' ', statePill(info.gone ? 'gone' : info.state), state.base === info.id && span('base', t('baseline'))),
			h('td', { class: 'num' }, whole(info.step)),
			h('td', { class: 'num' }, count(info.tokens)),
			h('td', { class: 'num' }, number(info.loss)),
			h('td', { class: 'num' }, count(info.speed)),
			h('td', { class: 'num' }, info.time ? duration(info.time - info.start) : '–'))))))];
}

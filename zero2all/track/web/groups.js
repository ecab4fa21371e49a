// Which charts there are: metric names in, groups of charts out. Names are paths (`loss/zh`, `time/forward`); a family
// is what lies below one first word, and is drawn in one chart when one run is shown, in one chart each when several are.

import { t } from './words.js';

const GROUPS = [
	['loss', (name) => /^(loss|perplexity|bpb)$/.test(name)],
	['channels', (name) => /^(loss|bpb)\//.test(name)],
	['optim', (name) => /^(lr|grad_norm|param_norm|update_norm|loss_scale)(\/|$)/.test(name)],
	['speed', (name) => /^(tokens_per_second|mfu|time|step_seconds|flops)(\/|$|_)/.test(name)],
	['memory', (name) => /^memory(\/|$|_)/.test(name)],
	['mixture', (name) => /^(mixture|tokens)\//.test(name)],
	['eval', (name) => /^(eval|valid|probe)(\/|$)/.test(name)],
	['gpu', (name) => /^gpu(\/|$)/.test(name)],
	['host', (name) => /^(host|cpu|disk|network)(\/|$)/.test(name)],
];
const STACKED = new Set(['time', 'mixture']);
const isTotal = (name) => name === 'time/step'; // the sum of its family: a line over the stack, not a part of it
const LINES_PER_CHART = 24;
const QUANTITY = /^(loss|bpb|perplexity|ppl|acc|accuracy|probability|share_among_foils|f1|exact_match)(_|$)/;
const UNITS = [
	['nats', /(^|\/)loss(\/|$)/],
	['bits', /(^|\/)bpb(\/|$)/],
	['tokensPerSecond', /^tokens_per_second$/],
	['seconds', /^time(\/|$)|_seconds$/],
	['GiB', /gib$/],
	['share', /^(mfu|hfu|mixture)(\/|$)|(^|\/)(acc\w*|probability|share\w*|fraction)(\/|$)/],
	['bytes', /^memory\//],
	['flops', /^flops$/],
	['W', /power/],
	['°C', /temperature/],
	['%', /utili[sz]ation|percent/],
];

// What a metric is counted in; nothing for plain numbers.
export const unitOf = (name) => t(UNITS.find(([, matches]) => matches.test(name))?.[0] ?? '');
const family = (name) => name.split('/')[0];
const below = (name) => name.slice(name.indexOf('/') + 1);

// [{key, charts: [{key, title, unit, metrics: [{name, label}], stacked, dots}]}] for these metric names.
export function arrange(names, search, isCompared) {
	const wanted = search.trim().toLowerCase().split(/\s+/).filter(Boolean);
	const found = wanted.length ? names.filter((name) => wanted.every((word) => name.toLowerCase().includes(word))) : names;
	const groups = new Map();
	for (const name of found) {
		const [known] = GROUPS.find(([, matches]) => matches(name)) ?? [];
		const key = known ?? (name.includes('/') ? family(name) : 'other');
		if (!groups.has(key)) groups.set(key, []);
		groups.get(key).push(name);
	}
	const order = (key) => {
		const place = GROUPS.findIndex(([known]) => known === key);
		return place >= 0 ? place : key === 'other' ? 999 : 100;
	};
	return [...groups]
		.sort(([a], [b]) => order(a) - order(b) || a.localeCompare(b))
		.map(([key, members]) => ({ key, charts: charts(key, members, isCompared), known: order(key) < 100 || key === 'other' }));
}

function charts(group, names, isCompared) {
	const single = (name) => ({ key: name, title: name, unit: unitOf(name), metrics: [{ name, label: name }], dots: group === 'eval', raw: isRaw(group, name) });
	if (isCompared) return names.sort(bySize).map(single);
	const together = new Map();
	for (const name of names) {
		const key = group === 'eval' ? evalChart(name)[0] : name.includes('/') ? `${family(name)}/*` : name;
		if (!together.has(key)) together.set(key, []);
		together.get(key).push(name);
	}
	const result = [];
	for (const [key, members] of together) {
		// A family whose members are of different sizes (degrees, watts, bytes) makes no common axis.
		const isMixed = group === 'gpu' || group === 'host' || !GROUPS.some(([known]) => known === group);
		if (members.length === 1 || isMixed) result.push(...members.map(single));
		else {
			members.sort((a, b) => isTotal(a) - isTotal(b));
			for (let start = 0; start < members.length; start += LINES_PER_CHART) {
				const part = members.slice(start, start + LINES_PER_CHART);
				const title = group === 'eval' ? key : family(key);
				result.push({
					key: start ? `${key}+${start}` : key,
					title: start ? `${title} (${start + 1}–${start + part.length})` : title,
					unit: unitOf(part[0]),
					metrics: part.map((name) => ({ name, label: group === 'eval' ? evalChart(name)[1] : below(name), isTotal: isTotal(name) })),
					stacked: STACKED.has(family(key)),
					dots: group === 'eval',
					raw: isRaw(group, key),
				});
			}
		}
	}
	return result.sort((a, b) => bySize(a.key, b.key));
}

// Plans, sums and scores are drawn as they are: smoothing would only bend them.
const isRaw = (group, name) => ['eval', 'memory', 'mixture'].includes(group) || /^(lr|flops)(\/|$)/.test(name);

// Scores of one quantity share a chart: `eval/valid/bpb/en` is the line en of `eval/valid/bpb`, and `eval/wiki/bpb` the
// line wiki of `bpb`. What is no quantity we know has a chart of its own.
function evalChart(name) {
	const parts = name.split('/');
	const at = parts.findLastIndex((part) => QUANTITY.test(part));
	if (at < 0) return [name, name];
	return at < parts.length - 1 ? [parts.slice(0, at + 1).join('/'), parts.slice(at + 1).join('/')] : [parts[at], parts.slice(1, at).join('/') || name];
}

const FIRST = ['loss', 'bpb', 'lr', 'grad_norm', 'tokens_per_second', 'mfu', 'time'];
const bySize = (a, b) => rank(a) - rank(b) || a.localeCompare(b);
const rank = (key) => (FIRST.indexOf(key.replace('/*', '')) + 99) % 99;

package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
)

// The schedule of a volume's snapshots is a setting in the volume's row of the table. The
// owner of the volume takes a snapshot at the beginning of each finest interval, and deletes
// scheduled snapshots wanted by no rule. The owner recognizes scheduled snapshots by name and
// leaves all other snapshots alone.

// keepRule keeps the first snapshot of each interval for a period.
type keepRule struct{ period, every time.Duration }

var intervals = map[string]time.Duration{
	"minutely": time.Minute, "hourly": time.Hour, "daily": 24 * time.Hour, "weekly": 7 * 24 * time.Hour, "monthly": 30 * 24 * time.Hour,
}

// parseKeep reads "24h:hourly,30d:daily". The empty text has no rules. Errors:
// Invalid.
func parseKeep(text string) (rules []keepRule, err error) {
	if text == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		period, every, ok := strings.Cut(strings.TrimSpace(part), ":")
		r := keepRule{}
		if ok {
			if r.period, err = parseSpan(period); err == nil {
				if r.every = intervals[every]; r.every == 0 {
					r.every, err = parseSpan(every)
				}
			}
		}
		switch {
		case !ok:
			err = errors.New("write PERIOD:INTERVAL, such as 24h:hourly")
		case err == nil && r.every < time.Second:
			err = errors.New("the interval is less than a second")
		case err == nil && r.period < r.every:
			err = errors.New("the period is shorter than the interval: nothing would be kept")
		case err == nil && r.period/r.every > meta.MaxSnapshots/4:
			err = fmt.Errorf("that is more than %d snapshots", meta.MaxSnapshots/4)
		}
		if err != nil {
			return nil, meta.E("read schedule", meta.Invalid, part, err)
		}
		rules = append(rules, r)
	}
	return rules, nil
}

// parseSpan is time.ParseDuration with days (d) and weeks (w).
func parseSpan(s string) (time.Duration, error) {
	for unit, d := range map[string]time.Duration{"d": 24 * time.Hour, "w": 7 * 24 * time.Hour} {
		if n, ok := strings.CutSuffix(s, unit); ok {
			if x, err := strconv.ParseUint(n, 10, 16); err == nil {
				return time.Duration(x) * d, nil
			}
		}
	}
	d, err := time.ParseDuration(s)
	if err == nil && d < 0 {
		err = errors.New("it is negative")
	}
	return d, err
}

const scheduledLayout = "auto-20060102T150405Z"

func scheduledName(now time.Time) string { return now.UTC().Format(scheduledLayout) }

func isScheduled(name string) bool {
	_, err := time.Parse(scheduledLayout, name)
	return err == nil
}

// finest is the shortest interval.
func finest(rules []keepRule) time.Duration {
	d := rules[0].every
	for _, r := range rules {
		d = min(d, r.every)
	}
	return d
}

// bucket numbers the intervals since 1970.
func bucket(t time.Time, every time.Duration) int64 { return t.UnixNano() / int64(every) }

// plan reports whether a snapshot is due, and returns the scheduled snapshots wanted by no
// rule. have lists the scheduled snapshots, oldest first; the newest is always wanted.
func plan(rules []keepRule, have []meta.Snapshot, now time.Time) (due bool, unwanted []meta.Snapshot) {
	taken := func(s meta.Snapshot) time.Time { return time.Unix(0, int64(s.Created)) }
	every := finest(rules)
	due = true
	for _, s := range have {
		due = due && bucket(taken(s), every) < bucket(now, every)
	}
	wanted := map[meta.Generation]bool{}
	if n := len(have); n > 0 {
		wanted[have[n-1].At] = true
	}
	for _, r := range rules {
		last := int64(-1)
		for _, s := range have {
			if b := bucket(taken(s), r.every); b != last && now.Sub(taken(s)) < r.period {
				wanted[s.At], last = true, b
			}
		}
	}
	return due, slices.DeleteFunc(slices.Clone(have), func(s meta.Snapshot) bool { return wanted[s.At] })
}

const (
	scheduleRead = time.Hour // how often the owner reads the row again
	// The pauses after failed snapshots: the first, and the longest. A pause above
	// scheduleRetry is at most an interval. Each try holds up writers for a moment.
	scheduleRetry    = 15 * time.Second
	scheduleRetryMax = 10 * time.Minute
)

// schedule is the schedule of a volume's snapshots. Guarded by the owner's mu.
type schedule struct {
	k         *kernel
	mirror    *mirrorTarget
	snapshots *snapshots

	keep  string    // the rules as read from the volume's row
	read  time.Time // when keep was read; zero: read again
	set   uint64    // counts the changes since the volume was opened
	open  bool      // snapshots are due more often than visits
	going scheduling
}

// scheduling records the failures of due snapshots. Guarded by the owner's mu.
type scheduling struct {
	tries int // failed tries since the last success
	since time.Time
	why   error
	next  time.Time
}

// failed notes a failed try, and returns the time until the next try.
func (s *scheduling) failed(why error, now time.Time, every time.Duration) time.Duration {
	if s.tries == 0 {
		s.since = now
	}
	wait := min(scheduleRetry<<min(s.tries, 10), scheduleRetryMax, max(every, scheduleRetry))
	s.tries++
	s.why, s.next = why, now.Add(wait)
	return wait
}

// failing describes the failures; nil if the last try succeeded.
func (s *scheduling) failing() *meta.ScheduleFailing {
	if s.tries == 0 {
		return nil
	}
	return &meta.ScheduleFailing{Since: s.since, Tries: s.tries, Why: s.why.Error(), Next: s.next}
}

// staysOpen reports whether a volume with the interval every must stay open, because the
// visits of so many volumes are too rare. For longer intervals see visits.due.
func staysOpen(every time.Duration, volumes int) bool {
	return every < 2*max(visitEvery, visitRound(volumes))
}

// scheduleChanged makes the owner read the changed schedule from the row again. (After two
// concurrent changes only the row shows the last.)
func (sc *schedule) scheduleChanged() {
	k := sc.k
	k.mu.Lock()
	sc.read, sc.going = time.Time{}, scheduling{}
	sc.set++
	k.mu.Unlock()
	k.tasks.snapshots.Wake()
}

// readSchedule returns the schedule, from the row if the last read is older than scheduleRead
// or if the schedule was changed.
func (sc *schedule) readSchedule() (string, error) {
	k := sc.k
	k.mu.Lock()
	defer k.mu.Unlock()
	for sc.read.IsZero() || time.Since(sc.read) >= scheduleRead {
		set := sc.set
		k.mu.Unlock()
		v, err := k.srv.cfg.Cluster.Volume(k.ctx, k.vol)
		k.mu.Lock()
		if err != nil && !errors.Is(err, meta.NoSuchVolume) {
			return "", err
		}
		if sc.set == set { // else the row may be older than the change
			sc.keep, sc.read = v.Keep, time.Now()
		}
	}
	return sc.keep, nil
}

// takeDue takes the due snapshot, except during the pause after a failed try, and returns the
// time until the next look.
func (sc *schedule) takeDue(every time.Duration) time.Duration {
	k := sc.k
	k.mu.Lock()
	wait := time.Until(sc.going.next)
	k.mu.Unlock()
	if wait > 0 {
		return wait
	}
	_, _, err := sc.snapshots.take(k.ctx, &meta.TakeSnapshot{Name: scheduledName(time.Now())}, takeHow{})
	if k.ctx.Err() != nil {
		return scheduleRead
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case errors.Is(err, meta.Exists): // a snapshot of another schedule, of this second
		return time.Second
	case err != nil:
		wait = sc.going.failed(err, time.Now(), every)
		k.log.Warn("a due snapshot could not be taken", "error", err, "tries", sc.going.tries, "again in", wait)
		return wait
	}
	sc.going = scheduling{}
	return scheduleRead
}

// keepSchedule takes and deletes the due snapshots, and returns the time until more can be
// due.
func (sc *schedule) keepSchedule() time.Duration {
	k := sc.k
	text, err := sc.readSchedule()
	if err != nil {
		return scheduleRetry
	}
	rules, err := parseKeep(text)
	if err != nil {
		k.log.Error("the schedule of snapshots can't be read", "error", err)
	}
	if sc.mirror.isMirror() {
		rules = nil // a mirror is being filled; each complete state has a snapshot
	}
	if len(rules) == 0 {
		k.mu.Lock()
		sc.open, sc.going = false, scheduling{}
		k.mu.Unlock()
		return scheduleRead
	}
	every := finest(rules)
	volumes := 0
	if view := k.srv.cfg.Cluster.View(); view != nil {
		volumes = len(view.Volumes)
	}
	k.mu.Lock()
	sc.open = staysOpen(every, volumes)
	k.mu.Unlock()
	all, err := sc.snapshots.list()
	if err != nil {
		return scheduleRetry
	}
	all = slices.DeleteFunc(all, func(s meta.Snapshot) bool { return s.Deleting || !isScheduled(s.Name) })
	due, unwanted := plan(rules, all, time.Now())
	wait := max(time.Until(time.Unix(0, (bucket(time.Now(), every)+1)*int64(every))), 10*time.Millisecond)
	if due {
		wait = min(wait, sc.takeDue(every))
	} else {
		k.mu.Lock()
		sc.going = scheduling{} // the failed snapshot was taken after all
		k.mu.Unlock()
	}
	for _, s := range unwanted {
		ctx, cancel := context.WithTimeout(k.ctx, scheduleRetry)
		err := sc.snapshots.deleteGeneration(ctx, s)
		switch {
		case err == nil || k.ctx.Err() != nil:
		case errors.Is(err, meta.Busy):
			k.log.Debug("a snapshot that the schedule keeps no longer is needed still", "name", s.Name, "error", err)
		default:
			k.log.Warn("a snapshot beyond the schedule's keep could not be deleted", "name", s.Name, "error", err)
		}
		cancel()
	}
	return min(wait, scheduleRead)
}

// setSchedule changes the schedule of a volume's snapshots; empty: no scheduled snapshots.
// Errors: Invalid, NoSuchVolume.
func (sc *schedule) setSchedule(ctx context.Context, keep string) error {
	if _, err := parseKeep(keep); err != nil {
		return err
	}
	if _, err := sc.k.srv.cfg.Cluster.UpdateVolume(ctx, sc.k.vol, func(v *cluster.Volume) error { v.Keep = keep; return nil }); err != nil {
		return err
	}
	sc.scheduleChanged()
	return nil
}

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

// The schedule of a volume's snapshots stands in its row of the table and is
// kept by whoever owns the volume: it takes one when the finest interval has
// begun anew, and deletes those that no rule wants any more. It knows its own
// snapshots by their names and leaves all others alone.

// keepRule wants the first snapshot of each interval for as long as a period.
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

// parseSpan is time.ParseDuration that knows days and weeks.
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

// plan tells whether a snapshot is due, and which of the scheduled ones, oldest
// first, no rule wants any more. The newest is always wanted.
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
	scheduleRead = time.Hour // how often the table is read again for it
	// After a snapshot that could not be taken, the first time and at most, but not
	// longer than an interval: each try holds up who writes for a moment.
	scheduleRetry    = 15 * time.Second
	scheduleRetryMax = 10 * time.Minute
)

// schedule is the schedule of a volume's snapshots. The owner's mu guards it.
type schedule struct {
	keep  string    // the rules, as the volume's row has them;
	read  time.Time // then. Zero: not yet, or they were changed since
	set   uint64    // how often they were changed since the volume was opened
	open  bool      // it asks for the volume more often than visits do
	going scheduling
}

// scheduling is how a schedule goes: whether what is due can be taken. Guarded by the
// owner's mu.
type scheduling struct {
	tries int // that failed, since the last that did not
	since time.Time
	why   error
	next  time.Time
}

// failed notes another try that failed, and tells when the next one is to be.
func (s *scheduling) failed(why error, now time.Time, every time.Duration) time.Duration {
	if s.tries == 0 {
		s.since = now
	}
	wait := min(scheduleRetry<<min(s.tries, 10), scheduleRetryMax, max(every, scheduleRetry))
	s.tries++
	s.why, s.next = why, now.Add(wait)
	return wait
}

// failing tells what is wrong, nil if nothing is.
func (s *scheduling) failing() *meta.ScheduleFailing {
	if s.tries == 0 {
		return nil
	}
	return &meta.ScheduleFailing{Since: s.since, Tries: s.tries, Why: s.why.Error(), Next: s.next}
}

// staysOpen: so many volumes can't be visited as often as a schedule wants, so one that
// has it is not closed. For longer intervals see visits.due.
func staysOpen(every time.Duration, volumes int) bool {
	return every < 2*max(visitEvery, visitRound(volumes))
}

// scheduleChanged has the volume's row read again, which has another schedule now. (Of
// two changes at once only the row tells which is the last.)
func (o *owner) scheduleChanged() {
	o.mu.Lock()
	o.schedule.read, o.schedule.going = time.Time{}, scheduling{}
	o.schedule.set++
	o.mu.Unlock()
	o.tasks.snapshots.Wake()
}

// readSchedule reads the row unless that was done a while ago, and gives the schedule.
func (o *owner) readSchedule() (string, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for o.schedule.read.IsZero() || time.Since(o.schedule.read) >= scheduleRead {
		set := o.schedule.set
		o.mu.Unlock()
		v, err := o.srv.cfg.Cluster.Volume(o.ctx, o.vol)
		o.mu.Lock()
		if err != nil && !errors.Is(err, meta.NoSuchVolume) {
			return "", err
		}
		if o.schedule.set == set { // else what was read may be what it was before
			o.schedule.keep, o.schedule.read = v.Keep, time.Now()
		}
	}
	return o.schedule.keep, nil
}

// takeDue takes the snapshot that is due, unless it is too early after a try that
// failed, and tells when it is to be looked at again.
func (o *owner) takeDue(every time.Duration) time.Duration {
	o.mu.Lock()
	wait := time.Until(o.schedule.going.next)
	o.mu.Unlock()
	if wait > 0 {
		return wait
	}
	_, _, err := o.takeSnapshot(o.ctx, &meta.TakeSnapshot{Name: scheduledName(time.Now())}, takeHow{})
	if o.ctx.Err() != nil {
		return scheduleRead
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case errors.Is(err, meta.Exists): // of another schedule, this very second
		return time.Second
	case err != nil:
		wait = o.schedule.going.failed(err, time.Now(), every)
		o.log.Warn("a snapshot that is due could not be taken", "error", err, "tries", o.schedule.going.tries, "again in", wait)
		return wait
	}
	o.schedule.going = scheduling{}
	return scheduleRead
}

// keepSchedule does what is due, and tells for how long nothing will be.
func (o *owner) keepSchedule() time.Duration {
	text, err := o.readSchedule()
	if err != nil {
		return scheduleRetry
	}
	rules, err := parseKeep(text)
	if err != nil {
		o.log.Error("the schedule of snapshots can't be read", "error", err)
	}
	if o.isMirror() {
		rules = nil // it is being filled; what is complete has a snapshot already
	}
	if len(rules) == 0 {
		o.mu.Lock()
		o.schedule.open, o.schedule.going = false, scheduling{}
		o.mu.Unlock()
		return scheduleRead
	}
	every := finest(rules)
	volumes := 0
	if view := o.srv.cfg.Cluster.View(); view != nil {
		volumes = len(view.Volumes)
	}
	o.mu.Lock()
	o.schedule.open = staysOpen(every, volumes)
	o.mu.Unlock()
	all, err := o.snapshots()
	if err != nil {
		return scheduleRetry
	}
	all = slices.DeleteFunc(all, func(s meta.Snapshot) bool { return s.Deleting || !isScheduled(s.Name) })
	due, unwanted := plan(rules, all, time.Now())
	wait := max(time.Until(time.Unix(0, (bucket(time.Now(), every)+1)*int64(every))), 10*time.Millisecond)
	if due {
		wait = min(wait, o.takeDue(every))
	} else {
		o.mu.Lock()
		o.schedule.going = scheduling{} // one that failed was taken all the same
		o.mu.Unlock()
	}
	for _, s := range unwanted {
		ctx, cancel := context.WithTimeout(o.ctx, scheduleRetry)
		err := o.deleteGeneration(ctx, s)
		switch {
		case err == nil || o.ctx.Err() != nil:
		case errors.Is(err, meta.Busy):
			o.log.Debug("a snapshot that the schedule keeps no longer is needed still", "name", s.Name, "error", err)
		default:
			o.log.Warn("a snapshot that the schedule keeps no longer could not be deleted", "name", s.Name, "error", err)
		}
		cancel()
	}
	return min(wait, scheduleRead)
}

// setSchedule changes what is kept of snapshots that the owner takes by itself; empty: none is
// taken. Errors: Invalid, NoSuchVolume.
func (o *owner) setSchedule(ctx context.Context, keep string) error {
	if _, err := parseKeep(keep); err != nil {
		return err
	}
	if _, err := o.srv.cfg.Cluster.UpdateVolume(ctx, o.vol, func(v *cluster.Volume) error { v.Keep = keep; return nil }); err != nil {
		return err
	}
	o.scheduleChanged()
	return nil
}

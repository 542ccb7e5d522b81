package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/metadata"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/operator"
)

// groupID is the id of the groups that tests lead through single steps.
const groupID = 42

// The steps of a group at a volume, in order.
const (
	groupHeld     = "hold"
	groupAwaited  = "ready"
	groupTaken    = "take"
	groupReleased = "release"
)

var groupSteps = []string{groupHeld, groupAwaited, groupTaken, groupReleased}

func numbered(volumes []meta.VolumeID) (refs []*admin.VolumeRef) {
	for _, v := range volumes {
		refs = append(refs, admin.Numbered(v))
	}
	return refs
}

func (p *peer) beginGroup(t *testing.T, name string, volumes ...meta.VolumeID) error {
	t.Helper()
	_, err := p.API.Groups.BeginGroup(t.Context(), &admin.BeginGroupRequest{Name: name, Id: groupID, Volumes: numbered(volumes)})
	return err
}

func (p *peer) abortGroup(t *testing.T, name string, volumes ...meta.VolumeID) {
	t.Helper()
	if _, err := p.API.Groups.AbortGroup(t.Context(), &admin.AbortGroupRequest{Name: name, Id: groupID, Volumes: numbered(volumes)}); err != nil {
		t.Fatal(err)
	}
}

func (p *peer) groupStep(t *testing.T, v meta.VolumeID, name, step string) (m meta.GroupMember, err error) {
	t.Helper()
	volume, api, ctx := admin.Numbered(v), p.API.Groups, t.Context()
	switch step {
	case groupHeld:
		_, err = api.HoldVolume(ctx, &admin.HoldVolumeRequest{Volume: volume, Name: name, Id: groupID})
	case groupAwaited:
		_, err = api.AwaitVolume(ctx, &admin.AwaitVolumeRequest{Volume: volume, Id: groupID})
	case groupTaken:
		var x *admin.GroupMember
		if x, err = api.TakeMember(ctx, &admin.TakeMemberRequest{Volume: volume, Id: groupID}); err == nil {
			admin.Hear(&m, x)
		}
	case groupReleased:
		_, err = api.ReleaseVolume(ctx, &admin.ReleaseVolumeRequest{Volume: volume, Id: groupID})
	}
	return m, err
}

// patient is a site whose holds stand however long the machine stands still: but for
// frozen, if not zero, once the snapshot is taken.
func patient(t *testing.T, frozen time.Duration) *site {
	t.Helper()
	return newSiteWith(t, time.Minute, func(c *Config) {
		c.groupHold, c.groupFrozen = 10*time.Minute, cmp.Or(frozen, 10*time.Minute)
	})
}

// toStep leads a group up to and including a step at all volumes, in their order.
func (p *peer) toStep(t *testing.T, name, last string, volumes ...meta.VolumeID) {
	t.Helper()
	if err := p.beginGroup(t, name, volumes...); err != nil {
		t.Fatal(err)
	}
	for _, step := range groupSteps {
		for _, v := range volumes {
			if _, err := p.groupStep(t, v, name, step); err != nil {
				t.Fatalf("%s at %d: %v", step, v, err)
			}
		}
		if step == last {
			return
		}
	}
}

// namesAt lists a volume's root at a snapshot.
func (p *peer) namesAt(t *testing.T, v meta.VolumeID, at meta.Generation) (names []string) {
	t.Helper()
	r, err := p.DoAt(t.Context(), v, at, &meta.ReadDir{Ino: meta.RootIno, Max: 10000})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range r.Entries {
		names = append(names, e.Name)
	}
	return names
}

// shots lists a volume's visible snapshots.
func (p *peer) shots(t *testing.T, v meta.VolumeID) (names []string) {
	t.Helper()
	l, err := p.Snapshots(t.Context(), v)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range l.Snapshots {
		if s.State != meta.SnapshotDeleting {
			names = append(names, s.Name)
		}
	}
	return names
}

// TestGroupIsOneMoment: between the snapshots of two volumes neither volume answers, so no change
// made in the first volume after its snapshot is a cause of a change in the second volume's
// snapshot. Without the freeze (PENSTOCK_CONTROL=meta-nofreeze), with the barrier of a single
// volume's snapshot in its place, such a cause exists.
func TestGroupIsOneMoment(t *testing.T) {
	t.Parallel()
	s := patient(t, groupFrozen)
	a, w := s.dial("a"), s.dial("w")
	second := a.volume(t, "second")
	for try := 0; ; try++ {
		name := fmt.Sprint("g", try)
		if err := a.beginGroup(t, name, 1, second); err != nil {
			t.Fatal(err)
		}
		for _, step := range []string{groupHeld, groupAwaited} {
			for _, v := range []meta.VolumeID{1, second} {
				if _, err := a.groupStep(t, v, name, step); err != nil {
					t.Fatalf("%s: %v", step, err)
				}
			}
		}
		one, err := a.groupStep(t, 1, name, groupTaken)
		if err != nil {
			t.Fatal(err)
		}
		written := make(chan struct{})
		go func() {
			defer close(written)
			for _, c := range []struct {
				v    meta.VolumeID
				name string
			}{{1, "cause" + name}, {second, "effect" + name}} {
				if _, err := w.Do(t.Context(), c.v, meta.OpID{}, newFile(c.name), meta.LeaseNone); err != nil {
					t.Error(err)
				}
			}
		}()
		select { // as long as the first volume may be held, the change isn't done
		case <-written:
		case <-time.After(groupFrozen / 4):
		}
		two, err := a.groupStep(t, second, name, groupTaken)
		for _, v := range []meta.VolumeID{1, second} {
			if err == nil {
				_, err = a.groupStep(t, v, name, groupReleased)
			}
		}
		<-written // nothing is held up longer than the limit
		if err == nil {
			cause, effect := a.namesAt(t, 1, one.At), a.namesAt(t, second, two.At)
			if slices.Contains(effect, "effect"+name) && !slices.Contains(cause, "cause"+name) {
				t.Fatalf("one moment of two volumes has the effect without the cause: %v, %v", cause, effect)
			}
			return
		}
		// On a machine that stood still meanwhile, the first hold was over.
		if !errors.Is(err, meta.Again) || try == 20 {
			t.Fatal(err)
		}
		a.abortGroup(t, name, 1, second)
	}
}

// TestGroupsWhileOthersWrite: linked counters in three volumes, groups and single
// snapshots taken meanwhile.
func TestGroupsWhileOthersWrite(t *testing.T) {
	t.Parallel()
	s := patient(t, 0)
	a := s.dial("a")
	vols := []meta.VolumeID{1, a.volume(t, "second"), a.volume(t, "third")}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var n atomic.Int64
	done := make(chan struct{})
	w := s.dial("w")
	go func() {
		defer close(done)
		for i := 0; ctx.Err() == nil && i < 3000; i++ {
			for _, v := range vols {
				if _, err := w.Do(t.Context(), v, meta.OpID{}, newFile(fmt.Sprintf("%06d", i)), meta.LeaseNone); err != nil {
					t.Error(err)
					return
				}
			}
			n.Store(int64(i))
		}
	}()
	defer func() { stop(); <-done }()
	taken := 0
	defer func() {
		if taken == 0 && !t.Failed() {
			t.Error("no group was taken")
		}
	}()
	for i := range 6 {
		g, err := a.TakeGroup(t.Context(), fmt.Sprint("g", i), vols, false)
		if errors.Is(err, meta.Unavailable) { // a machine that stood still, again and again
			t.Log(err)
			continue
		}
		taken++
		if err != nil || g.State != meta.GroupReady || !slices.Equal(g.Volumes(), vols) {
			t.Fatal(g, err)
		}
		var last []string
		for j, m := range g.Members {
			names := a.namesAt(t, m.Volume, m.At)
			if len(names) > 10000 {
				t.Fatal("more names than a page")
			}
			top := "none"
			if len(names) > 0 {
				top = slices.Max(names)
			}
			last = append(last, top)
			if j > 0 && top != "none" && (last[j-1] == "none" || top > last[j-1]) {
				t.Fatalf("group %d shows the counters %v: a later one is ahead", i, last)
			}
			if !slices.Contains(a.shots(t, m.Volume), g.Name) {
				t.Fatalf("volume %d does not show the group's snapshot", m.Volume)
			}
		}
		for from := n.Load(); n.Load() < from+2 && i < 5; { // the file is written on
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}
}

// TestGroupIsGivenUp: the leader of a group is gone after any step of the group. The volumes go
// on, no client sees a snapshot of the group, and the parts go: by the next caller that takes a
// group of the same name, or by the owners, also the next owners.
func TestGroupIsGivenUp(t *testing.T) {
	t.Parallel()
	for _, last := range groupSteps {
		for _, by := range []string{"the next", "owners", "the next owners"} {
			t.Run(strings.ReplaceAll(last+" "+by, " ", "-"), func(t *testing.T) {
				t.Parallel()
				s := patient(t, map[string]time.Duration{groupTaken: groupFrozen}[last])
				a := s.dial("a")
				second := a.volume(t, "second")
				a.toStep(t, "g", last, 1, second)
				a.file(t, 1, "after") // without a caller
				if by == "the next owners" {
					s.crash()
					s.start()
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				for _, v := range []meta.VolumeID{1, second} {
					if l := a.shots(t, v); len(l) > 0 {
						t.Fatalf("volume %d shows %v of a group that is undecided", v, l)
					}
				}
				s.cluster.began("g", time.Now())
				if _, err := a.API.Groups.BeginGroup(ctx, &admin.BeginGroupRequest{Name: "g", Id: groupID + 2, Volumes: numbered([]meta.VolumeID{1, second})}); !errors.Is(err, meta.Busy) {
					t.Error(err)
				}
				s.cluster.began("g", time.Now().Add(-2*groupOverdue))
				if by == "the next" {
					g, err := a.TakeGroup(ctx, "g", []meta.VolumeID{second, 1}, true)
					if err != nil || g.State != meta.GroupReady || g.ID == groupID {
						t.Fatal(g, err)
					}
					for _, m := range g.Members {
						if l := a.shots(t, m.Volume); !slices.Equal(l, []string{"g"}) {
							t.Fatalf("volume %d shows %v", m.Volume, l)
						}
					}
					if names := a.namesAt(t, 1, g.Members[0].At); !slices.Contains(names, "after") {
						t.Fatalf("the snapshot of before: %v", names)
					}
					return
				}
				for _, v := range []meta.VolumeID{1, second} {
					o, err := s.srv.hosted.ownerFor(ctx, v)
					if err != nil {
						t.Fatal(err)
					}
					for {
						o.tasks.snapshots.Wake()
						_, there, err := o.groups.member("g", groupID)
						if err != nil {
							t.Fatal(err)
						}
						if !there {
							break
						}
						if ctx.Err() != nil {
							t.Fatal("the snapshot of a group that is overdue stays")
						}
						time.Sleep(5 * time.Millisecond)
					}
				}
				// No later caller can decide otherwise.
				g, err := a.Group(ctx, "g")
				if err != nil {
					t.Fatal(err)
				}
				if want := map[bool]meta.GroupState{true: meta.GroupAborted, false: meta.GroupTaking}[last == groupTaken || last == groupReleased]; g.State != want {
					t.Fatalf("the group is %s, want %s", g.State, want)
				}
				// Nor does the record stay where no owner has a part of the group.
				if err := a.DeleteGroup(ctx, "g"); err != nil {
					t.Fatal(err)
				}
				if _, err := a.Group(ctx, "g"); !errors.Is(err, meta.NotFound) {
					t.Fatal(err)
				}
			})
		}
	}
}

// began has a group's record say that the group began at another time.
func (f *fakeCluster) began(name string, at time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	g := f.groups[name]
	g.Began = meta.Time(at.UnixNano())
	f.groups[name] = g
}

// TestGroupIsAllOrNone: for a volume that can't be snapshot, an owner that dies or whose hold is
// over, or a decision that comes too late, no group results.
func TestGroupIsAllOrNone(t *testing.T) {
	t.Parallel()
	vols := func(a *peer, t *testing.T) []meta.VolumeID { return []meta.VolumeID{1, a.volume(t, "second")} }
	none := func(t *testing.T, a *peer, name string, vols []meta.VolumeID) {
		t.Helper()
		for _, v := range vols {
			if slices.Contains(a.shots(t, v), name) {
				t.Errorf("volume %d shows a snapshot of a group that failed", v)
			}
		}
		if _, err := a.Group(t.Context(), name); !errors.Is(err, meta.NotFound) {
			t.Error(err)
		}
	}
	t.Run("exists", func(t *testing.T) {
		t.Parallel()
		s := patient(t, 0)
		a := s.dial("a")
		all := vols(a, t)
		a.take(t, all[1], "g")
		if _, err := a.TakeGroup(t.Context(), "g", all, false); !errors.Is(err, meta.Exists) {
			t.Fatal(err)
		}
		none(t, a, "g", all[:1])
		if _, err := a.TakeGroup(t.Context(), "h", append(all, 99), false); !errors.Is(err, meta.NoSuchVolume) {
			t.Fatal(err)
		}
		for _, name := range []string{"", ".", "a/b", "a@b", "a:b", "a\nb", strings.Repeat("x", meta.MaxName+1)} {
			if _, err := a.TakeGroup(t.Context(), name, all, false); !errors.Is(err, meta.Invalid) && (len(name) <= meta.MaxName || !errors.Is(err, meta.NameTooLong)) {
				t.Errorf("%q: %v", name, err)
			}
		}
		for _, l := range [][]meta.VolumeID{nil, {1, 1}, make([]meta.VolumeID, meta.MaxGroup+1)} {
			if _, err := a.TakeGroup(t.Context(), "h", l, false); !errors.Is(err, meta.Invalid) {
				t.Errorf("%v: %v", l, err)
			}
		}
		none(t, a, "h", all)
		if g, err := a.TakeGroup(t.Context(), "h", all, false); err != nil || len(g.Members) != 2 {
			t.Fatal(g, err)
		}
		if _, err := a.TakeGroup(t.Context(), "h", all, false); !errors.Is(err, meta.Exists) {
			t.Fatal(err)
		}
		o := s.srv.hosted.opened(all[0])
		a.shots(t, all[0])
		if _, err := a.DeleteSnapshot(t.Context(), all[0], "h"); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the owner forgets the group with its snapshot", func() error {
			o.mu.Lock()
			defer o.mu.Unlock()
			return unless(len(o.groups.known) == 0)
		})
		if err := a.DeleteGroup(t.Context(), "h"); err != nil {
			t.Fatal(err)
		}
		none(t, a, "h", all)
	})
	t.Run("strict", func(t *testing.T) {
		t.Parallel()
		s := patient(t, 0)
		a, b := s.dial("a"), s.dial("b")
		all := vols(a, t)
		ino := b.create(t, "f").Attr.Ino
		b.do(t, &meta.Open{Ino: ino}, meta.LeaseExclusive)
		if b.mode(ino) != meta.LeaseExclusive {
			t.Fatal("no exclusive lease")
		}
		b.mu.Lock()
		b.holdsOn = true
		b.mu.Unlock()
		if _, err := a.TakeGroup(t.Context(), "g", all, true); !errors.Is(err, meta.Unavailable) {
			t.Fatal(err)
		}
		none(t, a, "g", all)
		g, err := a.TakeGroup(t.Context(), "g", all, false)
		if err != nil || g.Members[0].Unanswered != 1 || !slices.Equal(g.Members[0].UnansweredBy, []string{"b"}) {
			t.Fatal(g, err)
		}
	})
	t.Run("owner dies", func(t *testing.T) {
		t.Parallel()
		s := patient(t, 0)
		a := s.dial("a")
		all := vols(a, t)
		a.toStep(t, "g", groupTaken, all...)
		s.crash()
		s.start()
		for _, v := range all {
			if _, err := a.groupStep(t, v, "g", groupReleased); !errors.Is(err, meta.Again) {
				t.Errorf("an owner that did not hold it says that it held: %v", err)
			}
		}
	})
	t.Run("too late", func(t *testing.T) {
		t.Parallel()
		s := patient(t, groupFrozen)
		a := s.dial("a")
		all := vols(a, t)
		a.toStep(t, "g", groupTaken, all...)
		for _, v := range all {
			a.file(t, v, "x") // waits until the hold is over
		}
		if _, err := a.groupStep(t, 1, "g", groupReleased); !errors.Is(err, meta.Again) {
			t.Fatalf("a hold that was over was released: %v", err)
		}
		s.cluster.began("g", time.Now().Add(-2*groupOverdue))
		o, err := s.srv.hosted.ownerFor(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := o.groups.dropUndecided(); err != nil {
			t.Fatal(err)
		}
		members := []*admin.GroupMember{{Volume: uint32(all[0]), Generation: 1}, {Volume: uint32(all[1]), Generation: 1}}
		if _, err := a.API.Groups.DecideGroup(t.Context(), &admin.DecideGroupRequest{Name: "g", Id: groupID, Volumes: numbered(all), Members: members}); !errors.Is(err, meta.Again) {
			t.Fatalf("a group that was given up is ready: %v", err)
		}
		// Nor can a late hold bring the group back.
		if _, err := a.groupStep(t, all[1], "g", groupHeld); !errors.Is(err, meta.Again) {
			t.Fatal(err)
		}
	})
}

// TestGroupNeedsEachVolume: a caller that takes a group needs the right to administer each of the
// group's volumes.
func TestGroupNeedsEachVolume(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	second, err := s.cluster.CreateVolume(t.Context(), "second", meta.Policy{Replicas: 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	all := []meta.VolumeID{1, second.ID}
	grant := func(id uint64, v meta.VolumeID, r cluster.Rights) cluster.Grant {
		return cluster.Grant{ID: id, Who: "client/x", Volume: v, Rights: r, Users: cluster.UsersAsIs}
	}
	s.grants(2, grant(1, 1, cluster.AdminRights), grant(2, second.ID, cluster.WriteRights))
	p := &peer{Operator: operator.New(t, s.addr, s.creds(peering.Client, "x"))}
	denied := func(err error) {
		t.Helper()
		if !errors.Is(err, meta.AccessDenied) {
			t.Error(err)
		}
	}
	_, err = p.TakeGroup(t.Context(), "g", all, false)
	denied(err)
	_, err = p.groupStep(t, second.ID, "g", groupHeld)
	denied(err)
	_, err = p.Groups(t.Context(), 0)
	denied(err)
	s.grants(3, grant(1, 1, cluster.AdminRights), grant(2, second.ID, cluster.AdminRights))
	if g, err := p.TakeGroup(t.Context(), "g", all, false); err != nil || g.State != meta.GroupReady {
		t.Fatal(g, err)
	}
	s.grants(4, grant(1, 1, cluster.AdminRights), grant(2, second.ID, cluster.WriteRights))
	denied(p.DeleteGroup(t.Context(), "g"))
	_, err = p.API.Groups.ForgetGroup(t.Context(), &admin.ForgetGroupRequest{Name: "g", Id: groupID, Volumes: numbered(all[:1])})
	if !errors.Is(err, meta.Exists) { // a group of other volumes
		t.Error(err)
	}
	if l, err := p.Groups(t.Context(), 1); err != nil || len(l) != 0 {
		t.Error("a group of a volume that it may not administer is listed", l, err)
	}
	passed := metadata.AppendToOutgoingContext(t.Context(), passedOn, "client/x")
	if l, err := operator.New(t, s.addr, s.creds(peering.Meta, "m2")).Groups(passed, 1); err != nil || len(l) != 0 {
		t.Error("a group of a volume that it may not administer is listed by way of another server", l, err)
	}
	for _, name := range []string{"g", "of nobody"} { // the refusal does not tell whether the group exists
		_, err = p.Group(t.Context(), name)
		denied(err)
	}
	s.grants(5, grant(1, 1, cluster.AdminRights), grant(2, second.ID, cluster.AdminRights))
	if l, err := p.Groups(t.Context(), 1); err != nil || len(l) != 1 {
		t.Error(l, err)
	}
	// A volume of the group that is gone for good delays no group, and neither do its rights.
	if g, err := p.Group(t.Context(), "g"); err != nil || len(g.Members) != 2 {
		t.Error(g, err)
	}
	if err := s.cluster.DeleteVolume(t.Context(), second.ID); err != nil {
		t.Fatal(err)
	}
	if err := p.DeleteGroup(t.Context(), "g"); err != nil {
		t.Error(err)
	}
}

// TestGroupWithVolumeInTrash: a volume in the trash is whole, and may come back. The volume's
// part of a group goes with the group; otherwise the part would come back as an ordinary snapshot
// of a group that never was. A volume that is gone for good delays no group.
func TestGroupWithVolumeInTrash(t *testing.T) {
	t.Parallel()
	s := patient(t, 0)
	a := s.dial("a")
	day := uint64(86400)
	row, err := a.CreateVolume(t.Context(), "second", meta.Policy{Replicas: 1}, meta.VolumeWords{TrashSeconds: &day})
	if err != nil {
		t.Fatal(err)
	}
	all := []meta.VolumeID{1, row.ID}
	discard := func(now bool) {
		t.Helper()
		if err := a.DeleteVolume(t.Context(), row.ID, now); err != nil {
			t.Fatal(err)
		}
	}
	forget := func(name string) {
		t.Helper()
		if err := a.DeleteGroup(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		if _, err := a.Group(t.Context(), name); !errors.Is(err, meta.NotFound) {
			t.Fatal(err)
		}
	}
	comesBack := func() {
		t.Helper()
		if _, err := a.UndeleteVolume(t.Context(), row.ID, "", ""); err != nil {
			t.Fatal(err)
		}
		if l := a.shots(t, row.ID); len(l) > 0 {
			t.Errorf("it came back with snapshots %v", l)
		}
	}
	a.toStep(t, "g", groupTaken, all...)
	discard(false)
	if _, err := a.groupStep(t, row.ID, "g", groupReleased); err == nil {
		t.Fatal("a volume in the trash was released")
	}
	a.abortGroup(t, "g", all...)
	forget("g")
	comesBack()

	if _, err := a.TakeGroup(t.Context(), "h", all, false); err != nil {
		t.Fatal(err)
	}
	discard(false)
	forget("h")
	comesBack()

	if _, err := a.TakeGroup(t.Context(), "i", all, false); err != nil {
		t.Fatal(err)
	}
	if err := a.beginGroup(t, "j", row.ID); err != nil {
		t.Fatal(err)
	}
	discard(true)
	forget("i")
	s.cluster.began("j", time.Now().Add(-2*groupOverdue))
	forget("j")
}

// TestNoMemberForSure: an owner denies having a part of a group only once the deletion is in the
// journal, and only as long as no other server can own the volume. The group's record goes by the
// denial, and the next owner must find no part that the owner would show.
func TestNoMemberForSure(t *testing.T) {
	t.Parallel()
	s := patient(t, 0)
	a := s.dial("a")
	a.toStep(t, "g", groupReleased, 1)
	a.abortGroup(t, "g", 1)
	o, err := s.srv.hosted.ownerFor(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	s.cluster.log.SetFull(true)
	defer s.cluster.log.SetFull(false)
	first := make(chan error, 1)
	go func() { first <- o.groups.deleteMember(t.Context(), "g", groupID) }()
	eventually(t, "the snapshot goes", func() error {
		_, there, err := o.groups.member("g", groupID)
		return errors.Join(err, unless(!there))
	})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := o.groups.deleteMember(ctx, "g", groupID); !errors.Is(err, meta.Interrupted) {
		t.Errorf("what is not in the journal is gone for sure: %v", err)
	}
	s.cluster.log.SetFull(false)
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	if err := o.groups.deleteMember(t.Context(), "g", groupID); err != nil {
		t.Fatal(err)
	}

	s.cluster.left.Store(new(time.Duration))
	if err := o.groups.deleteMember(t.Context(), "g", groupID); !errors.Is(err, meta.NotOwner) {
		t.Errorf("whose lease is over knows for sure: %v", err)
	}
	s.cluster.left.Store(nil)
	leave(o, true)
	if err := o.groups.deleteMember(t.Context(), "g", groupID); !errors.Is(err, meta.NotOwner) {
		t.Errorf("who hands the volume over knows for sure: %v", err)
	}
	leave(o, false)
	if err := o.groups.deleteMember(t.Context(), "g", groupID); err != nil {
		t.Fatal(err)
	}
}

// leave begins to hand a volume over, or gives the handover up.
func leave(o *owner, begin bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if begin {
		o.leaving = make(chan struct{})
		return
	}
	close(o.leaving)
	o.leaving = nil
}

// TestReleaseNeedsTheRight: an owner whose lease is over, or that hands its volume over, can't
// know whether another owner has answered changes: the owner does not claim that no changes were
// answered.
func TestReleaseNeedsTheRight(t *testing.T) {
	t.Parallel()
	s := patient(t, 0)
	a := s.dial("a")
	o, err := s.srv.hosted.ownerFor(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	for what, lose := range map[string]func(bool){
		"lease over": func(on bool) {
			s.cluster.left.Store(nil)
			if on {
				s.cluster.left.Store(new(time.Duration))
			}
		},
		"leaving":  func(on bool) { leave(o, on) },
		"in order": nil,
	} {
		a.toStep(t, what, groupTaken, 1)
		if lose == nil {
			if _, err := a.groupStep(t, 1, what, groupReleased); err != nil {
				t.Error(err)
			}
			continue
		}
		lose(true)
		err := o.groups.releaseHold(groupID)
		lose(false)
		if !errors.Is(err, meta.Again) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestGroupAnswersLost: the request that begins a group, or decides a group, is carried out but
// fails for its caller.
func TestGroupAnswersLost(t *testing.T) {
	t.Parallel()
	s := patient(t, 0)
	a := s.dial("a")
	lost := meta.E("write group", meta.Unavailable, "g", nil)
	hook := func(h func(meta.Group, func(meta.Group) (meta.Group, error)) (meta.Group, error)) {
		s.cluster.mu.Lock()
		defer s.cluster.mu.Unlock()
		s.cluster.putGroup = h
	}
	hook(func(g meta.Group, put func(meta.Group) (meta.Group, error)) (meta.Group, error) {
		made := g.Revision == 0
		g, err := put(g)
		if made {
			err = lost
		}
		return g, err
	})
	if _, err := a.TakeGroup(t.Context(), "g", []meta.VolumeID{1}, false); !errors.Is(err, meta.Unavailable) {
		t.Fatal(err)
	}
	if g, err := a.Group(t.Context(), "g"); !errors.Is(err, meta.NotFound) {
		t.Fatal("the record stays", g, err)
	}
	var late atomic.Pointer[meta.Group] // the decision, on its way
	hook(func(g meta.Group, put func(meta.Group) (meta.Group, error)) (meta.Group, error) {
		switch g.State {
		case meta.GroupReady:
			late.Store(&g)
			return g, lost
		case meta.GroupAborted: // the decision comes between the abort's reading and writing
			if d := late.Swap(nil); d != nil {
				if _, err := put(*d); err != nil {
					t.Error(err)
				}
			}
		}
		return put(g)
	})
	if g, err := a.TakeGroup(t.Context(), "g", []meta.VolumeID{1}, false); err != nil || g.State != meta.GroupReady {
		t.Fatal("it was decided", g, err)
	}
}

// TestGroupCallsAgain: each call that takes or deletes a group is carried out, and its answer is
// lost. A single group of a single attempt results; only a repeated release no longer tells
// whether the volume was held, and the group is taken anew.
func TestGroupCallsAgain(t *testing.T) {
	t.Parallel()
	s := patient(t, 0)
	b := newBreaker(t, s.addr)
	a := operator.New(t, b.addr(), nil)
	for lost := range uint64(8) { // begin, hold, await, take, release, decide; delete, forget
		name := fmt.Sprint("g", lost)
		before := s.srv.api.done.Load()
		when := func() bool { return s.srv.api.done.Load() > before+lost }
		b.when.Store(&when)
		if g, err := a.TakeGroup(t.Context(), name, []meta.VolumeID{1}, false); err != nil || g.State != meta.GroupReady {
			t.Fatalf("without answer %d: %v, %v", lost, g, err)
		}
		if l, err := a.Groups(t.Context(), 1); err != nil || len(l) != 1 || l[0].Name != name {
			t.Fatalf("without answer %d: groups are %v, %v", lost, l, err)
		}
		if err := a.DeleteGroup(t.Context(), name); err != nil {
			t.Fatalf("without answer %d: %v", lost, err)
		}
		if l, err := a.Groups(t.Context(), 0); err != nil || len(l) != 0 {
			t.Fatalf("without answer %d: groups are %v, %v", lost, l, err)
		}
	}
}

// TestMemberGoesWhileListed: a lister of snapshots has seen a part of an aborted group, and looks
// for the group's record when both are gone.
func TestMemberGoesWhileListed(t *testing.T) {
	t.Parallel()
	s := patient(t, 0)
	a := s.dial("a")
	a.toStep(t, "g", groupReleased, 1)
	o, err := s.srv.hosted.ownerFor(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	sn, there, err := o.groups.member("g", groupID)
	if err != nil || !there {
		t.Fatal(there, err)
	}
	a.abortGroup(t, "g", 1)
	if err := a.DeleteGroup(t.Context(), "g"); err != nil {
		t.Fatal(err)
	}
	if shown, err := o.groups.decided([]meta.Snapshot{sn}); err != nil || len(shown) > 0 {
		t.Errorf("a snapshot of a group that failed is shown: %v, %v", shown, err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.groups.known) > 0 {
		t.Error("it is like others from now on", o.groups.known)
	}
}

// TestGroupRecordUnreadable: a group's record is damaged, or a later version's. Its
// snapshots are not shown, and stay; others are shown, or go, as ever.
func TestGroupRecordUnreadable(t *testing.T) {
	t.Parallel()
	s := patient(t, 0)
	a := s.dial("a")
	o, err := s.srv.hosted.ownerFor(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, why := range []error{meta.Corrupt, meta.Version} {
		bad, aborted, single := fmt.Sprint("bad ", why), fmt.Sprint("aborted ", why), fmt.Sprint("single ", why)
		s.cluster.mu.Lock()
		s.cluster.readGroup = nil
		s.cluster.mu.Unlock()
		for _, name := range []string{bad, aborted} {
			a.toStep(t, name, groupReleased, 1)
		}
		a.take(t, 1, single)
		a.abortGroup(t, aborted, 1)
		s.cluster.mu.Lock()
		s.cluster.readGroup = func(name string) error {
			if name == bad {
				return meta.E("read cluster record", meta.KindOf(why), name, nil)
			}
			return nil
		}
		s.cluster.mu.Unlock()
		if l := a.shots(t, 1); slices.Contains(l, bad) || !slices.Contains(l, single) {
			t.Errorf("it shows %q", l)
		}
		if more, err := o.groups.dropUndecided(); !more || !errors.Is(err, why) {
			t.Error(more, err)
		}
		for name, want := range map[string]bool{bad: true, aborted: false} {
			if _, there, err := o.groups.member(name, groupID); err != nil || there != want {
				t.Errorf("%s: there %v, %v", name, there, err)
			}
		}
	}
}

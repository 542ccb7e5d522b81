package delta

import (
	"fmt"
	"maps"
	"slices"

	"penstock.io/penstock/meta"
)

// State is a version of a table.
//
// INVARIANT: a path is in Files or in Removed, not in both.
type State struct {
	Version  int64 // -1: the table has no version yet
	Protocol *Protocol
	Metadata *Metadata
	Files    map[string]*Add    // by path
	Removed  map[string]*Remove // by path; no file of the version, but of an earlier version
	Apps     map[string]*Txn    // by application
}

// NewState returns the state before the first commit.
func NewState() *State {
	return &State{Version: -1, Files: map[string]*Add{}, Removed: map[string]*Remove{}, Apps: map[string]*Txn{}}
}

// Done returns how far an application has come, or -1.
func (s *State) Done(app string) int64 {
	if t := s.Apps[app]; t != nil {
		return t.Version
	}
	return -1
}

// Apply makes the state that of the next version. Errors: Corrupt (an action that contradicts
// the state, or a first version without protocol and metadata), Version (the table needs a
// program that understands more). After an error the state is undefined.
func (s *State) Apply(version int64, actions []Action) error {
	if version != s.Version+1 {
		return meta.E("read commit", meta.Corrupt, commitName(version), fmt.Errorf("version %d does not follow version %d", version, s.Version))
	}
	if err := s.apply(actions); err != nil {
		return meta.E("read commit", meta.KindOf(err), commitName(version), err)
	}
	s.Version = version
	return nil
}

func (s *State) apply(actions []Action) error {
	const op = "apply action"
	for _, a := range actions {
		switch {
		case a.Protocol != nil:
			if a.Protocol.MinReader > readerVersion || a.Protocol.MinWriter > writerVersion {
				return meta.E(op, meta.Version, "protocol", fmt.Errorf("the table needs reader version %d and writer version %d, this program has %d and %d: use a newer program",
					a.Protocol.MinReader, a.Protocol.MinWriter, readerVersion, writerVersion))
			}
			s.Protocol = a.Protocol
		case a.Metadata != nil:
			s.Metadata = a.Metadata
		case a.Add != nil:
			if _, err := name(a.Add.Path); err != nil {
				return err
			}
			if a.Add.Size < 0 {
				return meta.E(op, meta.Corrupt, a.Add.Path, fmt.Errorf("a file has %d bytes", a.Add.Size))
			}
			delete(s.Removed, a.Add.Path)
			s.Files[a.Add.Path] = a.Add
		case a.Remove != nil:
			if _, err := name(a.Remove.Path); err != nil {
				return err
			}
			delete(s.Files, a.Remove.Path)
			s.Removed[a.Remove.Path] = a.Remove
		case a.Txn != nil:
			s.Apps[a.Txn.App] = a.Txn
		}
	}
	if s.Protocol == nil || s.Metadata == nil {
		return meta.E(op, meta.Corrupt, "metaData", fmt.Errorf("the table has no protocol or no schema"))
	}
	return nil
}

// Actions returns the actions that make up the state, as a checkpoint has them, always in the
// same order. Files that were removed before a time, ms since 1970, are left out: readers of
// the versions with these files have ended.
func (s *State) Actions(removedSince int64) []Action {
	all := []Action{{Protocol: s.Protocol}, {Metadata: s.Metadata}}
	for _, app := range slices.Sorted(maps.Keys(s.Apps)) {
		all = append(all, Action{Txn: s.Apps[app]})
	}
	for _, p := range slices.Sorted(maps.Keys(s.Removed)) {
		if s.Removed[p].Deleted >= removedSince {
			all = append(all, Action{Remove: s.Removed[p]})
		}
	}
	for _, p := range slices.Sorted(maps.Keys(s.Files)) {
		all = append(all, Action{Add: s.Files[p]})
	}
	return all
}

// Check verifies the invariants.
func (s *State) Check() error {
	for _, p := range slices.Sorted(maps.Keys(s.Files)) {
		if s.Removed[p] != nil {
			return meta.E("check table", meta.Corrupt, p, fmt.Errorf("the file is in the table and removed"))
		}
	}
	return nil
}

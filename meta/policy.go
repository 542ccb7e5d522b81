package meta

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Policy says how a volume treats its data and where the data lies.
type Policy struct {
	QuotaBytes  uint64 // 0: none
	QuotaInodes uint64
	// QuotaSnapshots: bytes that only snapshots hold count in the quota.
	QuotaSnapshots bool   `json:",omitempty"`
	Replicas       uint32 // at least 1
	// MinReplicas is the least number of replicas of a new chunk, and so the least number that
	// acknowledges a write. Where fewer than Replicas servers can take a new chunk, the chunk
	// begins with fewer, down to MinReplicas, and repair adds the missing replicas before any
	// other work. 0 stands for the default (see Least).
	MinReplicas uint32 `json:",omitempty"`
	MaxChunk    uint64 // bytes of the largest chunk, MinChunk to DefaultChunk; 0 means the latter
	SealOnClose bool
	Immutable   bool
	SyncOnClose bool
	NoAtime     bool // never update access times; else relatime by the client

	// Topology is the subtree of the chunks' servers, such as /dc1/rack2; "" and "/" mean
	// anywhere.
	Topology string
	// Spread is the kind of failure domain that two replicas of a chunk never share.
	Spread Spread
	// Class is the class of the chunks' disks; "" means any.
	Class string
	// LocalFirst: the first replica lies on the writer's own host if a server there can take
	// it.
	LocalFirst bool
	// Encrypt: the bytes of chunks travel over TLS only.
	Encrypt bool
}

// Least returns the least number of replicas of a new chunk. By default, one of three or more
// may be missing, and none of one or two: with two, the remaining replica would be the only
// copy of new data.
func (p *Policy) Least() uint32 {
	n := max(p.Replicas, 1)
	switch {
	case p.MinReplicas > 0:
		return min(p.MinReplicas, n)
	case n >= 3:
		return n - 1
	}
	return n
}

// policyWords has a function for each setting of a policy, which copies the setting from
// another policy. The keys are the names of the settings in commands and requests.
var policyWords = map[string]func(to, from *Policy){
	"quota":           func(to, from *Policy) { to.QuotaBytes = from.QuotaBytes },
	"quota-snapshots": func(to, from *Policy) { to.QuotaSnapshots = from.QuotaSnapshots },
	"quota-inodes":    func(to, from *Policy) { to.QuotaInodes = from.QuotaInodes },
	"replicas":        func(to, from *Policy) { to.Replicas = from.Replicas },
	"max-chunk":       func(to, from *Policy) { to.MaxChunk = from.MaxChunk },
	"seal-on-close":   func(to, from *Policy) { to.SealOnClose = from.SealOnClose },
	"immutable":       func(to, from *Policy) { to.Immutable = from.Immutable },
	"sync-on-close":   func(to, from *Policy) { to.SyncOnClose = from.SyncOnClose },
	"noatime":         func(to, from *Policy) { to.NoAtime = from.NoAtime },
	"topology":        func(to, from *Policy) { to.Topology = from.Topology },
	"spread":          func(to, from *Policy) { to.Spread = from.Spread },
	"class":           func(to, from *Policy) { to.Class = from.Class },
	"local-first":     func(to, from *Policy) { to.LocalFirst = from.LocalFirst },
	"min-replicas":    func(to, from *Policy) { to.MinReplicas = from.MinReplicas },
	"encrypt":         func(to, from *Policy) { to.Encrypt = from.Encrypt },
}

// PolicyWords are the names of a policy's words, in order.
func PolicyWords() []string { return slices.Sorted(maps.Keys(policyWords)) }

// Change copies the named settings from another policy, without checking the result. Errors:
// NotSupported (an unknown name).
func (p *Policy) Change(from *Policy, words ...string) error {
	for _, w := range words {
		take := policyWords[w]
		if take == nil {
			return E("change policy", NotSupported, w, errors.New("this program knows no such word of a policy"))
		}
		take(p, from)
	}
	return nil
}

// Differs returns the sorted names of the settings in which two policies differ; empty, not
// nil, if the policies are equal.
func (p *Policy) Differs(from *Policy) []string {
	all := []string{}
	for _, w := range PolicyWords() {
		x := *from
		policyWords[w](&x, p)
		if x != *from {
			all = append(all, w)
		}
	}
	return all
}

// Spread is a level of failure domains in the topology /dc/.../rack/node.
type Spread uint8

const (
	SpreadHost Spread = iota // never two replicas on one node (the whole path)
	SpreadRack               // never two in one rack (the path without its last part)
	SpreadDC                 // never two in one data centre (the first part of the path)
	spreads
)

var spreadNames = [spreads]string{"host", "rack", "dc"}

func (s Spread) String() string {
	if s < spreads {
		return spreadNames[s]
	}
	return fmt.Sprintf("spread %d", uint8(s))
}

// ParseSpread reads the name of a level. Errors: Invalid.
func ParseSpread(name string) (Spread, error) {
	for i, n := range spreadNames {
		if n == name {
			return Spread(i), nil
		}
	}
	return 0, E("read policy", Invalid, name, errors.New("a spread is host, rack or dc"))
}

// Bounds of a policy's words.
const (
	MaxReplicas = 16
	// MinChunk is the least allowed value for the largest chunk of a volume, in bytes: smaller
	// chunks cost more than their contents. DefaultChunk is its upper bound and default.
	MinChunk     = 4 << 20
	DefaultChunk = 1 << 30
	MaxTopology  = 255 // bytes of a path
	// MaxTrash is the longest time that a deleted volume may stay in the trash: ten years.
	MaxTrash = 10 * 365 * 24 * time.Hour
	MaxClass = 32
)

// Check checks a policy. Errors: Invalid.
func (p *Policy) Check() error {
	const op = "check policy"
	if p.Replicas < 1 || p.Replicas > MaxReplicas {
		return E(op, Invalid, "replicas", fmt.Errorf("%d is not in 1 to %d", p.Replicas, MaxReplicas))
	}
	if p.MinReplicas > p.Replicas {
		return E(op, Invalid, "min-replicas", fmt.Errorf("a chunk of %d replicas can't have at least %d: ask for at most that, or for 0, the default", p.Replicas, p.MinReplicas))
	}
	if p.MaxChunk != 0 && (p.MaxChunk < MinChunk || p.MaxChunk > DefaultChunk) {
		return E(op, Invalid, "largest chunk", fmt.Errorf("%d bytes are not in %d to %d", p.MaxChunk, MinChunk, DefaultChunk))
	}
	if p.Spread >= spreads {
		return E(op, Invalid, "spread", fmt.Errorf("level %d is not known", uint8(p.Spread)))
	}
	if p.Topology != "" {
		if err := CheckTopology(p.Topology); err != nil {
			return err
		}
	}
	return CheckClass(p.Class)
}

// CheckTopology checks a place in the topology: "/" or a path like /dc1/rack3/node7, with
// parts of letters, digits, dot, dash and underscore. Errors: Invalid.
func CheckTopology(at string) error {
	const op = "check topology"
	if at == "/" {
		return nil
	}
	if len(at) > MaxTopology || !strings.HasPrefix(at, "/") {
		return E(op, Invalid, at, fmt.Errorf("it is a path like /dc1/rack3/node7, of at most %d bytes", MaxTopology))
	}
	for part := range strings.SplitSeq(at[1:], "/") {
		if part == "" || part == "." || part == ".." || !isWord(part, true) {
			return E(op, Invalid, at, fmt.Errorf("%q is no part of a topology: letters, digits, dot, dash, underscore", part))
		}
	}
	return nil
}

// CheckClass checks the class of a disk: lower-case letters, digits and dashes, such as nvme,
// ssd, hdd; "" is valid. Errors: Invalid.
func CheckClass(class string) error {
	if len(class) > MaxClass || !isWord(class, false) {
		return E("check class", Invalid, class, fmt.Errorf("a class is at most %d lower-case letters, digits and dashes, such as nvme, ssd, hdd", MaxClass))
	}
	return nil
}

func isWord(s string, mixed bool) bool {
	for _, c := range []byte(s) {
		switch {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9', c == '-':
		case mixed && (c >= 'A' && c <= 'Z' || c == '.' || c == '_'):
		default:
			return false
		}
	}
	return true
}

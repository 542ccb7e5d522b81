package meta

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Policy says how a volume treats its data, and where it puts it.
type Policy struct {
	QuotaBytes  uint64 // 0: none
	QuotaInodes uint64
	// QuotaSnapshots: what snapshots alone hold counts in the quota of bytes.
	QuotaSnapshots bool   `json:",omitempty"`
	Replicas       uint32 // at least 1
	// MinReplicas is the least number of replicas that a chunk is opened with, and so
	// that acknowledges what is written: where fewer than Replicas servers can have a
	// new chunk, it begins with those, down to this number, and repair brings it to
	// full number before anything else. 0 stands for the default, see Least.
	MinReplicas uint32 `json:",omitempty"`
	MaxChunk    uint64 // bytes of the largest chunk, MinChunk to DefaultChunk; 0 means the latter
	SealOnClose bool
	Immutable   bool
	SyncOnClose bool
	NoAtime     bool // never update access times; else relatime by the client

	// Topology is the subtree that chunks lie in, such as /dc1/rack2; "" and "/"
	// mean anywhere.
	Topology string
	// Spread is what two replicas of a chunk never share.
	Spread Spread
	// Class is the class of the disks that chunks lie on; "" means any.
	Class string
	// LocalFirst: the first replica lies on the writer's own host, if a server
	// there may have it. Volumes of before this word was known have it set.
	LocalFirst bool
	// Encrypt: the bytes of chunks travel over TLS only.
	Encrypt bool
}

// Least is the number of replicas that a new chunk has at least. By default one of
// three or more may be missing, and none of one or two: of two, the one that is left
// would be the only copy of what is written.
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

// policyWords take over one word of another policy, by the name that commands and
// requests have for it.
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

// Change takes over the words of another policy that are named. What comes of it is
// not checked. Errors: NotSupported (a name that is not known).
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

// Differs names the words in which a policy differs from another, in order; empty,
// not nil, if they are the same.
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
	SpreadHost Spread = iota // two replicas never on one node, that is the whole path
	SpreadRack               // nor on nodes of one rack: the path without its last part
	SpreadDC                 // nor in one data centre: the first part of the path
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
	// MinChunk is the smallest that the largest chunk of a volume may be, in bytes:
	// below, chunks cost more than what is in them. DefaultChunk is the largest.
	MinChunk     = 4 << 20
	DefaultChunk = 1 << 30
	MaxTopology  = 255 // bytes of a path
	// MaxTrash is the longest that a deleted volume is kept in the trash: ten years.
	MaxTrash = 10 * 365 * 24 * time.Hour
	MaxClass = 32
)

// Check says what is wrong with a policy. Errors: Invalid.
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

// CheckTopology says what is wrong with a place in the topology: it is "/" or a
// path like /dc1/rack3/node7, its parts of letters, digits, dot, dash and
// underscore. Errors: Invalid.
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

// CheckClass says what is wrong with the class of a disk: lower-case letters,
// digits and dashes, such as nvme, ssd, hdd; "" is fine. Errors: Invalid.
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

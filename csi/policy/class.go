// Package policy owns the settings that users of a container orchestrator may give for
// volumes, and translates the settings into Penstock's policies: parameters of storage classes
// and of volume attributes classes, mount options, places. The package does no I/O: strings
// and maps in, policies and errors out.
package policy

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/meta"
)

// Terms are the settings under which the cluster keeps a volume.
type Terms struct {
	Policy      meta.Policy
	Compression meta.Compression // of chunks sealed after the setting
	// TrashSeconds is how long a deleted volume's data stays restorable in the trash.
	TrashSeconds uint64
	// The advisory quota refuses nothing; 0: none.
	AdvisoryBytes  uint64
	AdvisoryInodes uint64
}

// Class is a storage class, decoded: the settings of a volume to create.
type Class struct {
	Terms // without a quota of bytes, which is the claim's
	// Level is the topology level of the subtree, around the requested place, in which the
	// volume's bytes lie.
	Level Level
	// Prefix goes between handle.Made and the orchestrator's name of the volume.
	Prefix string
	// AttachPath is the volume's path in the tree; "": the volume is not attached.
	AttachPath string
}

// Parameters added by the provisioner, and terms of attachPath.
const (
	orchestrator    = "csi.storage.k8s.io/"
	claimName       = orchestrator + "pvc/name"
	claimNamespace  = orchestrator + "pvc/namespace"
	volumeOfClaim   = orchestrator + "pv/name"
	EphemeralMark   = orchestrator + "ephemeral"
	podName         = orchestrator + "pod.name"
	podNamespace    = orchestrator + "pod.namespace"
	DefaultAttach   = "/kubernetes/{namespace}/{claim}"
	attachNowhere   = "none"
	maxAttachLength = 1024
)

// setter parses one parameter into t. The error does not contain the value: users write
// passwords into wrong lines, and the driver's answer is logged and kept in events.
type setter func(t *Terms, value string) error

// mutable has the parameters of a class that a volume attributes class can change later.
var mutable = map[string]setter{
	"replicas": func(t *Terms, v string) error {
		n, err := strconv.ParseUint(v, 10, 32)
		if err != nil || n < 1 || n > meta.MaxReplicas {
			return fmt.Errorf("it is a number from 1 to %d", meta.MaxReplicas)
		}
		t.Policy.Replicas = uint32(n)
		return nil
	},
	"class": func(t *Terms, v string) error {
		if v == "" || meta.CheckClass(v) != nil {
			return fmt.Errorf("it is a class of disks, such as nvme, ssd or hdd: at most %d lower-case letters, digits and dashes", meta.MaxClass)
		}
		t.Policy.Class = v
		return nil
	},
	"topology": func(t *Terms, v string) error {
		if meta.CheckTopology(v) != nil {
			return fmt.Errorf("it is / or a path like /dc1/rack3 of at most %d bytes, its parts of letters, digits, dot, dash and underscore", meta.MaxTopology)
		}
		if t.Policy.Topology = v; v == "/" {
			t.Policy.Topology = ""
		}
		return nil
	},
	"spread": func(t *Terms, v string) (err error) {
		if t.Policy.Spread, err = meta.ParseSpread(v); err != nil {
			return errors.New("the value must be host, rack or dc")
		}
		return nil
	},
	"inodes":         files(func(t *Terms) *uint64 { return &t.Policy.QuotaInodes }),
	"quotaSnapshots": boolean(func(p *meta.Policy, on bool) { p.QuotaSnapshots = on }),
	"compression": func(t *Terms, v string) (err error) {
		if t.Compression, err = meta.ParseCompression(v); err != nil {
			return errors.New("the value must be none, s2 or zstd")
		}
		return nil
	},
	"maxChunk": func(t *Terms, v string) error {
		n, err := parseSize(v)
		if err != nil || n != 0 && (n < meta.MinChunk || n > meta.DefaultChunk) {
			return fmt.Errorf("it is a size from %dMi to %dMi, or 0 for the largest", meta.MinChunk>>20, meta.DefaultChunk>>20)
		}
		t.Policy.MaxChunk = n
		return nil
	},
	"trash": func(t *Terms, v string) error {
		d, err := time.ParseDuration(v)
		if err != nil || d < 0 || d%time.Second != 0 || d > meta.MaxTrash {
			return fmt.Errorf("it is a time in whole seconds, such as 24h, at most %dh; 0s for none", meta.MaxTrash/time.Hour)
		}
		t.TrashSeconds = uint64(d / time.Second)
		return nil
	},
	"advisoryQuota": func(t *Terms, v string) (err error) {
		t.AdvisoryBytes, err = parseSize(v)
		return err
	},
	"advisoryInodes": files(func(t *Terms) *uint64 { return &t.AdvisoryInodes }),
	"minReplicas": func(t *Terms, v string) error {
		n, err := strconv.ParseUint(v, 10, 32)
		if err != nil || n > meta.MaxReplicas {
			return fmt.Errorf("it is a number from 1 to that of replicas, or 0 for the default: one less than replicas from 3 on, else all")
		}
		t.Policy.MinReplicas = uint32(n)
		return nil
	},
	"localFirst":  boolean(func(p *meta.Policy, on bool) { p.LocalFirst = on }),
	"syncOnClose": boolean(func(p *meta.Policy, on bool) { p.SyncOnClose = on }),
	"noatime":     boolean(func(p *meta.Policy, on bool) { p.NoAtime = on }),
}

// fixed has the parameters that never change after the volume was created.
var fixed = map[string]setter{
	"sealOnClose": boolean(func(p *meta.Policy, on bool) { p.SealOnClose = on }),
	"encrypt":     boolean(func(p *meta.Policy, on bool) { p.Encrypt = on }),
}

func boolean(set func(*meta.Policy, bool)) setter {
	return func(t *Terms, v string) error {
		if v != "true" && v != "false" {
			return errors.New(`it is "true" or "false"`)
		}
		set(&t.Policy, v == "true")
		return nil
	}
}

// files reads a number of files and directories.
func files(to func(*Terms) *uint64) setter {
	return func(t *Terms, v string) error {
		n, err := strconv.ParseUint(v, 10, 63)
		if err != nil {
			return errors.New("it is a number of files and directories; 0 for no limit")
		}
		*to(t) = n
		return nil
	}
}

// wrong returns the error for a parameter's invalid value. err states the valid values and
// does not contain the value: see setter.
func wrong(parameter string, err error) error {
	return meta.E("read parameters", meta.Invalid, parameter, err)
}

// unknown returns the error for an unknown parameter, without its value: any value could be a
// password.
func unknown(parameter, instead string) error {
	return meta.E("read parameters", meta.Invalid, strconv.Quote(parameter[:min(len(parameter), 64)]), errors.New("it is unknown; "+instead))
}

// maxPodName is Kubernetes' own bound.
const maxPodName = 253

// Pod returns the namespace and name of the pod to which a volume is published, from the
// volume's context. Both are empty if the context lacks either, or either is no valid name.
func Pod(attributes map[string]string) (namespace, name string) {
	namespace, name = attributes[podNamespace], attributes[podName]
	for _, s := range []string{namespace, name} {
		if s == "" || len(s) > maxPodName || strings.ContainsFunc(s, outsideName) {
			return "", ""
		}
	}
	return namespace, name
}

// keys returns a map's keys, sorted, so that of several mistakes the same mistake is reported
// each time.
func keys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// ReadClass parses the parameters of a storage class, and applies changed, the parameters of a
// volume attributes class. volume is the orchestrator's name for the volume. Errors: Invalid,
// with the name of the invalid parameter.
func ReadClass(parameters, changed map[string]string, volume string) (Class, error) {
	c := Class{Terms: Terms{Policy: meta.Policy{Replicas: 1, LocalFirst: true}}}
	attach := ""
	for _, k := range keys(parameters) {
		v := parameters[k]
		var err error
		switch {
		case mutable[k] != nil:
			err = mutable[k](&c.Terms, v)
		case fixed[k] != nil:
			err = fixed[k](&c.Terms, v)
		case k == "topologyLevel":
			c.Level, err = parseLevel(v)
		case k == "volumeNamePrefix":
			c.Prefix, err = v, handle.CheckPrefix(v)
		case k == "attachPath":
			attach, err = v, checkTemplate(v)
		case strings.HasPrefix(k, orchestrator): // read below, or for others
		default:
			return Class{}, unknown(k, "a class may have "+strings.Join(known(), ", "))
		}
		if err != nil {
			return Class{}, wrong(k, err)
		}
	}
	if err := Change(&c.Terms, changed); err != nil {
		return Class{}, err
	}
	if attach == "" && parameters[claimName] != "" && parameters[claimNamespace] != "" {
		attach = DefaultAttach
	}
	if attach != "" && attach != attachNowhere {
		at, err := fill(attach, map[string]string{"namespace": parameters[claimNamespace], "claim": parameters[claimName], "volume": cmp.Or(parameters[volumeOfClaim], volume)})
		if err != nil {
			return Class{}, wrong("attachPath", err)
		}
		c.AttachPath = at
	}
	return c, c.Policy.Check()
}

func known() []string {
	all := append(keys(mutable), keys(fixed)...)
	all = append(all, "topologyLevel", "volumeNamePrefix", "attachPath")
	slices.Sort(all)
	return all
}

// Change applies the parameters of a volume attributes class. Errors: Invalid.
func Change(t *Terms, parameters map[string]string) error {
	for _, k := range keys(parameters) {
		set := mutable[k]
		if set == nil {
			return unknown(k, "what can be changed: "+strings.Join(keys(mutable), ", "))
		}
		if err := set(t, parameters[k]); err != nil {
			return wrong(k, err)
		}
	}
	return t.Policy.Check()
}

// SnapshotParameters refuses every parameter of a snapshot class but the parameters added by
// the sidecars. Errors: Invalid.
func SnapshotParameters(parameters map[string]string) error {
	for _, k := range keys(parameters) {
		if !strings.HasPrefix(k, orchestrator) {
			return unknown(k, "a class of snapshots has no parameters")
		}
	}
	return nil
}

// ReadInline parses a pod's attributes of its inline volume: the size, and only parameters
// that cost other users nothing. Errors: Invalid.
func ReadInline(attributes map[string]string) (t Terms, err error) {
	t.Policy = meta.Policy{Replicas: 1, LocalFirst: true, QuotaBytes: 1 << 30}
	for _, k := range keys(attributes) {
		v := attributes[k]
		switch {
		case k == "size":
			if t.Policy.QuotaBytes, err = parseSize(v); err == nil && t.Policy.QuotaBytes == 0 {
				err = errors.New("the value must be greater than 0")
			}
		case k == "class" || k == "noatime" || k == "inodes":
			err = mutable[k](&t, v)
		case strings.HasPrefix(k, orchestrator):
		default:
			return Terms{}, unknown(k, "a volume of a pod may have size, inodes, class and noatime")
		}
		if err != nil {
			return Terms{}, wrong(k, err)
		}
	}
	return t, t.Policy.Check()
}

// suffixes are the units of Kubernetes' quantities.
var suffixes = []struct {
	text   string
	factor uint64
}{{"Ki", 1 << 10}, {"Mi", 1 << 20}, {"Gi", 1 << 30}, {"Ti", 1 << 40}, {"Pi", 1 << 50}, {"k", 1e3}, {"M", 1e6}, {"G", 1e9}, {"T", 1e12}, {"P", 1e15}}

func parseSize(s string) (uint64, error) {
	factor := uint64(1)
	digits := s
	for _, x := range suffixes {
		if rest, found := strings.CutSuffix(s, x.text); found {
			digits, factor = rest, x.factor
			break
		}
	}
	n, err := strconv.ParseUint(digits, 10, 63)
	if err != nil || n > math.MaxInt64/factor {
		return 0, errors.New("it is a number of bytes, such as 10Gi, 500M or 1048576")
	}
	return n * factor, nil
}

// Size returns a volume's quota in bytes: required, or limit if required is 0. A limit of 0 is
// no limit; a quota of 0 is no quota. Errors: Invalid (a negative capacity), Range (required
// exceeds limit).
func Size(required, limit int64) (uint64, error) {
	const op = "choose size"
	switch {
	case required < 0 || limit < 0:
		return 0, meta.E(op, meta.Invalid, "capacity", errors.New("a capacity must not be negative"))
	case limit > 0 && required > limit:
		return 0, meta.E(op, meta.Range, "capacity", fmt.Errorf("%d bytes are required, more than the limit of %d", required, limit))
	case required == 0:
		return uint64(limit), nil
	}
	return uint64(required), nil
}

// Fits reports whether a volume with this quota (0: none) satisfies required and limit.
func Fits(quota uint64, required, limit int64) bool {
	if quota == 0 {
		return limit == 0
	}
	return quota >= uint64(required) && (limit == 0 || quota <= uint64(limit))
}

// Same reports whether two terms are equal but for the quota of bytes.
func Same(a, b Terms) bool {
	a.Policy.QuotaBytes, b.Policy.QuotaBytes = 0, 0
	return a == b
}

// checkTemplate checks an attachPath with the placeholders {namespace}, {claim} and {volume}.
func checkTemplate(t string) error {
	if t == attachNowhere {
		return nil
	}
	at, err := fill(t, map[string]string{"namespace": "n", "claim": "c", "volume": "v"})
	switch {
	case err != nil:
		return err
	case !strings.Contains(t, "{volume}") && !(strings.Contains(t, "{namespace}") && strings.Contains(t, "{claim}")):
		return errors.New("it contains {namespace} and {claim}, or {volume}: each volume hangs at a path of its own")
	case strings.Count(at, "/") < 2:
		return errors.New("it is at least one directory below the root of the tree")
	}
	return nil
}

// fill replaces the template's placeholders by values. A value is a component of a path, or a
// piece of a component.
func fill(t string, values map[string]string) (string, error) {
	at := t
	for _, k := range keys(values) {
		if !strings.Contains(at, "{"+k+"}") {
			continue
		}
		v := values[k]
		if v == "" {
			return "", fmt.Errorf("the request has no value for {%s}; start the provisioner with --extra-create-metadata", k)
		}
		if len(v) > meta.MaxName || v == "." || v == ".." || strings.IndexFunc(v, outsideName) >= 0 {
			return "", fmt.Errorf("the value of {%s} can't be a name in a path: at most %d letters, digits, dots, dashes, underscores", k, meta.MaxName)
		}
		at = strings.ReplaceAll(at, "{"+k+"}", v)
	}
	if strings.IndexFunc(at, outsidePath) >= 0 || path.Clean(at) != at || !path.IsAbs(at) || at == "/" || len(at) > maxAttachLength {
		return "", errors.New("it is an absolute path of letters, digits, dots, dashes and underscores, without . and .. and //; placeholders are {namespace}, {claim} and {volume}")
	}
	for part := range strings.SplitSeq(at, "/") {
		if len(part) > meta.MaxName {
			return "", fmt.Errorf("a name in it has more than %d bytes", meta.MaxName)
		}
	}
	return at, nil
}

func outsideName(r rune) bool {
	return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '-' || r == '_')
}

func outsidePath(r rune) bool { return r != '/' && outsideName(r) }

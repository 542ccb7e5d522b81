// Package layers owns the shape of the source tree: which package may import
// which, and why; which packages must stay pure; how long a file may be. The
// rules are data; the test beside them reads every source file of the module
// and compares.
package layers

// Module is the module's path.
const Module = "penstock.io/penstock"

// row lists the imports that a folder may have of this module. Paths are relative to the module,
// "." is the client library at the root, and "meta/*" stands for the package and all packages
// below.
type row struct {
	path    string
	imports []string
	why     string
}

// table is the layout, lowest first. A folder without a row is an error, so that a new package
// declares its place. Where several rows match, the longest path wins.
var table = []row{
	{"meta", nil, "words come first: everybody speaks them, so they import the standard library only"},
	{"meta/namespace", []string{"meta"}, "the state machine is replayed bit by bit: it sees a store, a context and an operation"},
	{"meta/lock", []string{"meta"}, "advisory locks are a machine of their own, kept in memory only"},
	{"meta/lease", []string{"meta"}, "which session may cache what, decided without a clock; messages are results"},
	{"meta/quota", []string{"meta"}, "the account of bytes used and promised, for the owner of a volume"},
	{"meta/replica", []string{"meta"}, "the pure machines of replication and seal: chunk servers, writers and owners ask them"},
	{"meta/task", nil, "when background work is done, and when all of it has ended, whatever the work is"},
	{"meta/placement", []string{"meta"}, "plans are a pure function of the cluster's description"},
	{"meta/digest", []string{"meta"}, "a fingerprint is a function of the files alone"},
	{"meta/digest/known", []string{"meta", "meta/digest"}, "blocks on disk whose digest is known"},
	{"meta/index", []string{"meta"}, "a file that answers for a snapshot: a function of what is in it"},
	{"meta/capability", []string{"meta"}, "signed by meta, verified by chunk servers: above neither"},
	{"meta/blobdir", []string{"meta"}, "blobs as files of one folder"},
	{"meta/peer", []string{"meta"}, "who is at the other end of a connection: below all that connect"},
	{"meta/journal", []string{"meta"}, "the log orders bytes and does not know what they mean"},
	{"meta/journal/journaltest", []string{"meta", "meta/journal"}, "one suite for all forms of the log"},
	{"meta/keep", []string{"meta"}, "memory that outlives a process: records and bytes, whose meaning is its users'"},
	{"meta/process", []string{"meta"}, "tells processes apart for owners of volumes and holders of sessions"},
	{"meta/journal/etcd", []string{"meta", "meta/journal", "meta/process", "meta/cluster/embedded"}, "one form of the log; its tests run a real etcd"},
	{"meta/state", []string{"meta", "meta/namespace", "meta/journal"}, "stores the effects that the machine returns"},
	{"meta/cluster", []string{"meta", "meta/peer", "meta/capability"}, "etcd's keys in the words of meta; who belongs to the cluster"},
	{"meta/cluster/embedded", []string{"meta", "meta/cluster"}, "runs etcd for one machine; nobody below needs to know"},
	{"meta/wire", []string{"meta"}, "frames translate words to bytes"},
	{"meta/admin", []string{"meta", "meta/peer"}, "the administrative API: words and a client, for whoever administers; never the server's insides"},
	{"meta/admin/gen", nil, "writes what is generated of the API's definition; must not need it"},
	{"meta/server", []string{"meta/*"}, "the one loop that drives the pure machines"},
	{"meta/server/pins", []string{"meta", "meta/namespace"}, "a guest of a volume's owner: it sees the state and the operations through an interface of its own"},
	{"meta/client", []string{"meta", "meta/wire", "meta/peer", "meta/process", "meta/task"}, "finds the owner and speaks its frames; never the server's insides"},

	{"chunkserver/castagnoli", nil, "a checksum is a function of bytes: below the words that use it"},
	{"chunkserver", []string{"meta", "chunkserver/castagnoli"}, "words of the chunk protocol"},
	{"chunkserver/store", []string{"meta", "meta/replica", "chunkserver"}, "bytes on a disk; knows no network and no files"},
	{"chunkserver/wire", []string{"meta", "chunkserver"}, "frames of the data path"},
	{"chunkserver/server", []string{"meta", "chunkserver/*", "meta/client", "meta/wire", "meta/peer", "meta/process", "meta/capability"}, "serves a store; calls meta, never the other way round; the time since boot is what it counts clocks on"},
	{"chunkserver/client", []string{"meta", "meta/replica", "chunkserver", "chunkserver/wire", "meta/capability", "meta/peer"}, "the user's side of the data path"},

	{".", []string{"meta", "meta/admin", "meta/client", "meta/digest", "meta/index", "meta/keep", "meta/lock", "meta/peer", "meta/process", "meta/task", "meta/wire", "chunkserver", "chunkserver/client"}, "the client library: the only way to meta and chunk servers; locks on snapshots are its own"},
	{"fuse/kernel", []string{"meta"}, "what Linux tells of mounts, connections and processes: whoever serves or holds mounts asks it"},
	{"fuse/hold", []string{"fuse/kernel", "meta", "meta/keep", "meta/process"}, "the holder has descriptors: it knows neither files nor what the kernel asks, and outlives the processes that do"},
	{"fuse", []string{".", "fuse/hold", "fuse/kernel", "meta", "meta/keep", "meta/process"}, "kernel requests become calls of the client library; what it leaves to a successor lies beside what that does"},
	{"stream/log", []string{"meta"}, "batches, producers and recovery are functions of the log's bytes"},
	{"stream/group", nil, "a consumer group is a machine of its own: it knows no stream and no protocol"},
	{"table/delta", []string{"meta"}, "the log of a table, in a directory that is handed in: streams publish in one, tables do"},
	{"stream/placement", nil, "all gateways choose the same leader: a function of what is led and of the list of gateways"},
	{"stream/decompress", []string{"stream/log"}, "bytes that any client has compressed, within bounds: for whoever reads records"},
	{"stream/compact", []string{"stream/decompress", "stream/log"}, "what a compaction keeps is a function of a segment's bytes"},
	{"stream/partition", []string{"meta", "stream/compact", "stream/decompress", "stream/log"}, "a log on files of a directory that is handed in: its tests crash a directory in memory"},
	{"stream/publish", []string{"meta", "stream/decompress", "stream/log", "table/delta"}, "the log of a partition and the files of a stream are handed in: its tests crash a directory in memory"},
	{"stream/offsets", []string{"meta", "stream/partition"}, "a file in a directory of the same kind"},
	{"stream/lines", []string{"meta", "stream/decompress", "stream/log", "stream/partition"}, "the text of records is a function of a partition's batches, wherever the batches come from"},
	{"stream", []string{".", "meta", "stream/lines", "stream/log", "stream/offsets", "stream/partition", "stream/placement", "stream/publish"}, "a user of the client library like any other"},
	{"stream/kafka", []string{"meta", "stream", "stream/group", "stream/log", "stream/offsets", "stream/partition", "stream/placement"}, "translates a protocol into calls of streams; opens no session"},
	{"stream/ingest", nil, "messages of a protocol, generated"},
	{"stream/ingest/client", []string{"meta", "stream/ingest"}, "a client of a gateway: it opens no session and knows no log"},
	{"stream/ingest/server", []string{"meta", "stream", "stream/ingest", "stream/log", "stream/partition", "stream/placement"}, "translates requests of another protocol into appends; opens no session"},
	{"table", []string{".", "meta"}, "a user of the client library like any other"},
	{"csi/handle", []string{"meta"}, "names and handles are pure words"},
	{"csi/policy", []string{"meta", "meta/placement", "csi/handle"}, "what users may say of volumes, decided without doing anything"},
	{"csi/cluster", []string{"meta", "meta/admin", "meta/client", "meta/peer", "meta/process", "meta/wire", "csi/policy"}, "a session and words: the driver asks metadata servers as an administrator does"},
	{"csi/reply", []string{"meta", "csi/policy"}, "how services answer: below both of them"},
	{"csi/controller", []string{"meta", "csi/cluster", "csi/handle", "csi/policy", "csi/reply"}, "one service of the driver; mounts nothing"},
	{"csi/node", []string{"meta", "meta/process", "csi/cluster", "csi/handle", "csi/policy", "csi/reply"}, "the other one; mounts by a program that is handed in"},
	{"csi", []string{"meta", "csi/controller", "csi/node"}, "puts the services on a socket"},

	{"cmd/penstock/bench", nil, "measures any directory: it must not know which file system it runs on"},
	{"cmd/penstock/spawn", nil, "runs the binary as a child; knows nothing of what is inside"},
	{"cmd/penstock/demo", []string{"cmd/penstock/spawn"}, "drives the binary and the kernel as a user does"},
	{"cmd/penstock/kube", []string{"meta"}, "asks an API server; what for is for others to know"},
	{"cmd/penstock/admin", []string{"meta", "meta/peer"}, "serves metrics and health of whatever part is handed in, behind the same gate as the servers"},
	{"cmd/penstock", []string{"*"}, "flags and signals; wires what it likes"},
	{"test", []string{"*"}, "tests may reach everything"},
}

// outside says which folders alone may import a module of others; prefixes of
// import paths. What is not named here may be used anywhere above the words.
var outside = []struct {
	module string
	only   []string
	why    string
}{
	{"go.etcd.io/etcd", []string{"meta/journal/etcd", "meta/cluster", "cmd", "test"}, "etcd is behind the journal and the cluster map, nowhere else"},
	{"github.com/cockroachdb/pebble", []string{"meta/state"}, "the state store is replaceable"},
	{"github.com/hanwen/go-fuse", []string{"fuse", "test", "cmd/penstock"}, "one package speaks to the kernel"},
	{"github.com/twmb/franz-go", []string{"stream/kafka", "cmd/penstock", "test"}, "the Kafka protocol ends at its server and at the commands of a client"},
	{"github.com/parquet-go/parquet-go", []string{"table/delta", "stream/publish", "test"}, "Parquet is a format of published tables, and of their logs' checkpoints"},
	{"github.com/spf13/cobra", []string{"cmd", "test/k8s"}, "flags belong to the command line, and to those of Kubernetes"},
	{"google.golang.org/grpc", []string{"meta/admin", "meta/server", "meta/cluster", "meta/journal/etcd", "csi", "stream", "table", "cmd", "test"}, "administration is gRPC; metadata travels in frames of our own: a quarter of the CPU of a call"},
	{"github.com/prometheus", []string{"cmd", "csi", "meta/server", "chunkserver/server", "fuse"}, "metrics are served by roles"},
}

// neither are folders below the folders of outside that may not import the module.
var neither = map[string][]string{
	"github.com/hanwen/go-fuse": {"fuse/hold", "fuse/kernel"}, // both live on when the protocol's server has ended
}

// standardOnly are packages that import nothing but the standard library and
// the rows above.
var standardOnly = []string{"meta", "meta/namespace", "meta/lock", "meta/placement", "meta/digest", "meta/index", "meta/lease", "meta/quota", "meta/replica", "chunkserver", "meta/wire", "meta/capability"}

// pure are the packages that map (state, event) to (state, actions): no clock,
// chance, goroutine, I/O or map order inside, so that a replay gives the same
// bytes and a simulation the same run.
var pure = []string{"meta", "csi/handle", "csi/policy", "meta/namespace", "meta/lock", "meta/placement", "meta/digest", "meta/index", "meta/lease", "meta/quota", "meta/replica", "stream/log", "stream/group", "stream/placement"}

// forbiddenImports and forbiddenCalls hold in pure packages. time itself may be
// imported for its durations.
var (
	forbiddenImports = []string{"os", "net", "math/rand", "math/rand/v2", "crypto/rand", "io/ioutil", "syscall", "log", "log/slog"}
	forbiddenCalls   = map[string][]string{
		"time": {"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "NewTimer", "NewTicker", "Tick"},
	}
)

// Limits on size. The largest file of a code base says more about it than its
// typical one.
const (
	maxLines            = 1000 // of a source file
	maxTestLines        = 1500 // of a test file: tables are long
	maxInterfaceMethods = 20
)

// vagueNames are package names that say nothing about what they own.
var vagueNames = []string{"util", "utils", "common", "helpers", "helper", "misc", "shared", "base", "types"}

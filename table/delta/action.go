// Package delta owns the transaction log of a table: which Parquet files make up a version of
// the table, and how the next version is committed. The log is that of the Delta Lake protocol
// (https://github.com/delta-io/delta/blob/master/PROTOCOL.md), reader version 1 and writer
// version 2, without table features; of writer version 2 the log uses delta.appendOnly. Any
// program that reads Delta tables reads the table.
//
// The log is the directory _delta_log of the table:
//
//	00000000000000000007.json                a commit: version 7, an action a line
//	00000000000000000100.checkpoint.parquet  all actions that are in force at version 100
//	_last_checkpoint                         the version of the last checkpoint
//
// The directory decides between writers: a commit is a file that Dir.Create makes whole or not
// at all, and only if no file has its name. A writer that finds the name taken reads the commit
// of the other writer and decides again (Table.Commit).
//
// Paths of files are relative to the table, so that a renamed, cloned or snapshotted directory
// is the same table.
package delta

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/url"
	"strings"

	"penstock.io/penstock/meta"
)

// Versions of the protocol that a program must understand to read or write the tables.
const (
	readerVersion = 1
	writerVersion = 2
)

// Action is a line of a commit. Exactly one field is not nil; a commit of another program may
// have actions that are not listed here, which Decode leaves out.
type Action struct {
	Txn        *Txn        `json:"txn,omitempty" parquet:"txn,optional"`
	Add        *Add        `json:"add,omitempty" parquet:"add,optional"`
	Remove     *Remove     `json:"remove,omitempty" parquet:"remove,optional"`
	Metadata   *Metadata   `json:"metaData,omitempty" parquet:"metaData,optional"`
	Protocol   *Protocol   `json:"protocol,omitempty" parquet:"protocol,optional"`
	CommitInfo *CommitInfo `json:"commitInfo,omitempty" parquet:"-"`
}

// Protocol says which versions of the protocol a program must understand.
type Protocol struct {
	MinReader int32 `json:"minReaderVersion" parquet:"minReaderVersion"`
	MinWriter int32 `json:"minWriterVersion" parquet:"minWriterVersion"`
}

// Metadata describes the table.
type Metadata struct {
	ID               string            `json:"id" parquet:"id"`
	Format           Format            `json:"format" parquet:"format"`
	Schema           string            `json:"schemaString" parquet:"schemaString"`
	PartitionColumns []string          `json:"partitionColumns" parquet:"partitionColumns,list"`
	Configuration    map[string]string `json:"configuration" parquet:"configuration"`
	Created          int64             `json:"createdTime" parquet:"createdTime"` // ms since 1970
}

// Format names the format of the files.
type Format struct {
	Provider string            `json:"provider" parquet:"provider"`
	Options  map[string]string `json:"options" parquet:"options"`
}

// Add takes a file into the table.
type Add struct {
	Path            string            `json:"path" parquet:"path"`
	PartitionValues map[string]string `json:"partitionValues" parquet:"partitionValues"`
	Size            int64             `json:"size" parquet:"size"`                         // bytes
	Modified        int64             `json:"modificationTime" parquet:"modificationTime"` // ms since 1970
	DataChange      bool              `json:"dataChange" parquet:"dataChange"`             // false: the rows were in the table before
	Stats           string            `json:"stats,omitempty" parquet:"stats,optional"`    // JSON: numRecords, minValues, maxValues, nullCount
	Tags            map[string]string `json:"tags,omitempty" parquet:"tags,optional"`
}

// Remove takes a file out of the table. Readers of an older version need the file still.
type Remove struct {
	Path       string `json:"path" parquet:"path"`
	Deleted    int64  `json:"deletionTimestamp" parquet:"deletionTimestamp"` // ms since 1970
	DataChange bool   `json:"dataChange" parquet:"dataChange"`               // false: the rows stay in the table
}

// Txn says how far an application has come. A writer commits a Txn beside its files, so that
// work that was committed is recognised after a crash.
type Txn struct {
	App     string `json:"appId" parquet:"appId"`
	Version int64  `json:"version" parquet:"version"`
	Updated int64  `json:"lastUpdated" parquet:"lastUpdated"` // ms since 1970
}

// CommitInfo says for people where a commit comes from.
type CommitInfo struct {
	Time      int64  `json:"timestamp"` // ms since 1970
	Operation string `json:"operation"`
	Engine    string `json:"engineInfo"`
}

// Encode returns the bytes of a commit.
func Encode(actions []Action) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	for _, a := range actions {
		if err := e.Encode(a); err != nil {
			panic("delta: an action of plain values can't be encoded: " + err.Error())
		}
	}
	return b.Bytes()
}

// Decode decodes a commit. Errors: Corrupt.
func Decode(p []byte) (actions []Action, err error) {
	for n, line := range bytes.Split(p, []byte{'\n'}) {
		if len(bytes.TrimSpace(line)) == 0 {
			continue
		}
		var a Action
		if err := json.Unmarshal(line, &a); err != nil {
			return nil, meta.E("read commit", meta.Corrupt, fmt.Sprintf("line %d", n+1), err)
		}
		switch a.fields() {
		case 0: // an action that this program does not know
		case 1:
			actions = append(actions, a)
		default:
			return nil, meta.E("read commit", meta.Corrupt, fmt.Sprintf("line %d", n+1), fmt.Errorf("the line has more than one action"))
		}
	}
	return actions, nil
}

// fields counts the actions of a line.
func (a *Action) fields() (n int) {
	for _, there := range []bool{a.Txn != nil, a.Add != nil, a.Remove != nil, a.Metadata != nil, a.Protocol != nil, a.CommitInfo != nil} {
		if there {
			n++
		}
	}
	return n
}

// name returns the path of a file in the table's directory for the path in an action, which is
// a URI. Errors: Corrupt (no path below the table).
func name(uri string) (string, error) {
	p, err := url.PathUnescape(uri)
	if err != nil || p == "" || strings.HasPrefix(p, "/") || strings.Contains(uri, "://") || strings.ContainsRune(p, 0) {
		return "", meta.E("read commit", meta.Corrupt, uri, fmt.Errorf("the path of a file is not relative to the table"))
	}
	return p, nil
}

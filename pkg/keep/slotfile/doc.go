// Package slotfile keeps tables of fixed-size records in a shared memory file (memfd), so that the
// records survive the end of the process at any instruction, also by SIGKILL. A descriptor store
// keeps the file open. The next process opens the file and finds every committed record.
//
// # Guarantees
//
//   - Put replaces a record atomically. The next process sees the old or the new record, and never
//     a part of one. Once Put returned, the next process sees the new record or a later one.
//   - Each record is atomic on its own. There is no update of several records at once. The order of
//     calls is preserved: if Put(a) returned before Put(b) began, a process that sees the record of
//     b also sees the record of a. The same holds for Free and for the counters.
//   - A slot that was allocated, and has no record yet, is free in the next process.
//   - The file is memory. It does not survive a restart of the host.
//
// # Layout
//
// All integers have the byte order of the host. The file has a fixed size, which is enough for the
// maximum of each table. The kernel gives it memory in chunks when a table grows, so most of the
// file is a hole. The seals F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL fix the size, so that no
// other program can shrink the file and cause SIGBUS here.
//
// Header:
//
//	offset  bytes  field
//	     0      8  magic
//	     8      4  format version; at this place in all versions
//	    12      4  schema version of the caller
//	    16      4  number of tables, at most 63
//	    20      4  CRC-32C of the header, in which fields marked * and this field are zero
//	    24      8  size of the file
//	    32      8  * restart count, as a checked word
//	    40     24  zero
//	    64  63*64  one entry for each table; unused entries are zero
//
// Entry of a table:
//
//	offset  bytes  field
//	     0     32  name, padded with NUL
//	    32      4  bytes of a record
//	    36      4  counters of a slot
//	    40      4  maximum number of slots
//	    44      4  zero
//	    48      8  offset of slot 0 in the file, a multiple of 4096
//	    56      8  * number of slots that have memory, as a checked word
//
// The low half of a checked word is the value, and the high half is its complement.
//
// Slot, where R is the size of a record rounded up to a multiple of 8, and N is the number of
// counters:
//
//	offset      bytes  field
//	0               8  state: 0 if the slot is free; otherwise the sequence number in the low half
//	                   and the checksum of the record in the high half
//	8             8*N  counters
//	8+8*N           R  copy 0 of the record
//	8+8*N+R         R  copy 1 of the record
//
// The lowest bit of the sequence number selects the copy that holds the record. The checksum is
// CRC-32C of the record, and its initial value depends on the table, the slot and the sequence
// number. Put writes the other copy, and then publishes it with one store of the state word.
//
// # Memory order
//
// A killed process stops between two instructions of each thread. All its earlier stores reach the
// memory, because the kernel and the caches outlive it. Only the order of the instructions matters.
// The state word is stored with sync/atomic, so neither the compiler nor the CPU moves an earlier
// store behind it. A store of a later Put may become visible early, but it goes to the copy that
// the state word does not select. The next process can open the file only after all threads of the
// earlier process have left user mode, see below.
//
// # One writer
//
// A descriptor that comes out of a descriptor store shares its open file description with the store
// and with earlier processes. A lock of that description would outlive the process, and would not
// exclude anyone who has the description. A File therefore opens /proc/self/fd/N, which gives a
// description that only this process has, and holds flock(2) LOCK_EX on it. The descriptor and the
// mapping refer to this description. The kernel releases the lock when both are gone, which is when
// no thread of the process runs anymore. The lock is advisory: it excludes only users of this
// package.
//
// # Concurrency
//
// Methods of a Table may run concurrently for different slots. Alloc and Len may run concurrently
// with everything. Put and Free of the same slot need a lock of the caller. The counter methods are
// atomic: they may run concurrently with one another and with Put of the same slot, but not with
// Free. Each must not run concurrently with Put or Free. Close must not run concurrently with any
// other method.
//
// The package locks only the list of free slots of each table.
package slotfile
